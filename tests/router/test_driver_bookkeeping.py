"""What a request keeps while it runs: its load, whom it avoids, its time, its failures in a row."""

import asyncio

import pytest
from tests.router.builders import driver, job
from tests.router.memory_places import MemoryPlaces
from tests.router.stub_worker import MASK, ConnectionBreaks, StubWorker, say
from tests.router.test_driver import LONG, Client, cluster, prefill_and_decode
from tests.router.test_driver_failures import fails_once

from sangam_core.answer import Completion
from sangam_core.decoding import Commit
from sangam_core.errors import BlockLost, InvalidRequest
from sangam_core.geometry import Geometry
from sangam_core.lifecycle import Event, Request
from sangam_core.placement import Demand, Role
from sangam_core.wire import BlockEvent, BlockStart, PassRan, Prefilled
from sangam_router.metrics import RouterMetrics
from sangam_router.places import Place
from sangam_router.run import Run


async def test_a_prefill_s_load_is_off_the_worker_while_its_block_still_decodes() -> None:
    worker = StubWorker(answer=say(LONG))
    seen: list[tuple[int, bool]] = []
    async with cluster(worker) as (driven, places):

        async def look(start: BlockStart, step: int) -> None:
            if step == 2:
                await places.until(lambda: places.seats["w"].load().outstanding_prefill_tokens == 0)
                seen.append((start.key.block, places.seats["w"].load().free_pages < 100))

        worker.before_pass = look
        await asyncio.wait_for(driven.run(job(max_tokens=96), Client().emit), 5)
    assert seen == [(0, True), (1, True), (2, True)]


async def test_a_worker_that_lost_a_block_is_avoided_for_that_block_only() -> None:
    failing = StubWorker("a", epoch="ae", answer=say(LONG))
    failing.before_pass = fails_once(1, ConnectionBreaks)
    other = StubWorker("b", epoch="be", answer=say(LONG))
    async with cluster(failing, other) as (driven, places):
        load = await places.prefill(
            Request("load", 0.5, Geometry(1000, 1)), Demand("load", 1000, 1), {"ae"}, is_new=True
        )
        answer = await driven.run(job(max_tokens=64), Client().emit)
        await places.release(load)
    assert load.worker_id == "b", "the one that fails is the least loaded throughout"
    assert answer.timings.placements == [["a", "b"], ["a"]]


async def test_a_later_block_gets_what_is_left_of_the_request_s_time() -> None:
    seconds = 0.0
    prefill, decode = prefill_and_decode()

    async def take_seven_seconds(start: BlockStart, step: int) -> None:
        nonlocal seconds
        seconds += 7.0

    prefill.before_pass = take_seven_seconds
    limits = {"request_seconds": 100.0}
    async with cluster(prefill, decode, limits=limits, clock=lambda: seconds) as (driven, _):
        await driven.run(job(max_tokens=96), Client().emit)
    assert [start.deadline_seconds for start in prefill.starts] == [100.0, 93.0, 86.0]
    assert [start.deadline_seconds for start in decode.starts] == [93.0, 86.0, 79.0]


def test_a_complete_block_ends_a_row_of_failures() -> None:
    """The back-off grows with that row: what went wrong in other blocks must not prolong it."""
    run = a_run()
    place = Place("w", "e", "http://w", Role.COLOCATED, None)
    for _ in range(5):
        run.placed(place, 0.0, "prefill")
        run.advance(Event.PREFILL_PLACED)
        run.failed_at(place, "no_pages")
        run.advance(Event.PLACE_REFUSED)
    assert run.num_failures_in_row == 5
    run.advance(Event.PREFILL_PLACED)
    run.advance(Event.PREFILLED_IN_PLACE)
    block = run.job.geometry.block_range(0)
    commits = tuple(Commit(position=p, token=104, confidence=1.0) for p in block)
    event = PassRan(step=0, commits=commits, completion=Completion.BLOCK)
    assert run.passed(event) is Event.BLOCK_COMPLETE
    assert (run.num_failures_in_row, run.timings.num_retries) == (0, 5)


def a_run() -> Run:
    return Run(
        job(max_tokens=64),
        Client().emit,
        mask_id=MASK,
        decode=lambda ids: bytes(ids).decode(),
        metrics=RouterMetrics(),
        clock=lambda: 0.0,
        deadline=100.0,
    )


# -- two errors at once ---------------------------------------------------------------------------


class DiesAsTheDecodeIsRefused:
    """A ``WorkerClient``: its sender breaks at the very moment at which the receiver says 400."""

    def __init__(self) -> None:
        self.num_prefills = 0
        self._is_watched, self._now = asyncio.Event(), asyncio.Event()

    async def open(self, url: str, start: BlockStart) -> "DyingSender":
        """Start the prefill; refuse the decode, once the sender is being watched."""
        if start.source is None:
            self.num_prefills += 1
            return DyingSender(start, self._is_watched, self._now)
        await self._is_watched.wait()
        asyncio.get_running_loop().call_soon(self._now.set)
        await self._now.wait()  # after the sender, so that its error is the first
        raise InvalidRequest("max_tokens: too long for this worker", param="max_tokens")


class DyingSender:
    """The stream of a block that is prefilled, until the moment comes."""

    def __init__(self, start: BlockStart, is_watched: asyncio.Event, dies: asyncio.Event) -> None:
        first = start.geometry.geometry().block_range(0).start
        commits = (Commit(position=first, token=104, confidence=1.0),)
        self._events: list[BlockEvent] = [
            Prefilled(queue_seconds=0.0, prefill_seconds=0.0),
            PassRan(step=0, commits=commits),
        ]
        self._is_watched, self._dies = is_watched, dies

    async def next_event(self) -> BlockEvent:
        if self._events:
            return self._events.pop(0)
        self._is_watched.set()
        await self._dies.wait()
        raise BlockLost("the sender died")

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    async def __aenter__(self) -> "DyingSender":
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


async def test_a_request_that_can_never_run_is_not_repeated_because_its_sender_died_too() -> None:
    places = MemoryPlaces(StubWorker("p", Role.PREFILL), StubWorker("d", Role.DECODE))
    workers = DiesAsTheDecodeIsRefused()
    with pytest.raises(InvalidRequest, match="too long for this worker"):
        await asyncio.wait_for(driver(places, workers, max_lost=3).run(job(), Client().emit), 5)
    assert workers.num_prefills == 1
    assert places.is_empty
