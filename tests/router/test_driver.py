"""The driver over stub workers: from the first place to the last token, wherever the blocks run."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tests.router.builders import driver, job, worker_client
from tests.router.memory_places import MemoryPlaces
from tests.router.stub_worker import EOS, StubWorker, say

from sangam_core.decoding import Decoding, EosRule
from sangam_core.errors import DeadlineExceeded, Overloaded, Unavailable
from sangam_core.placement import Role
from sangam_core.wire import BlockKey, BlockStart
from sangam_router.driver import Driver
from sangam_router.job import Delta

Hook = Callable[[BlockStart, int], Awaitable[None]]
LONG = "The quick brown fox jumps over the lazy dog while seventeen cats look on in silence."
"""Three blocks."""


class Client:
    """Collects what an answer's client is told."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def emit(self, delta: Delta) -> None:
        self.deltas.append(delta)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


@asynccontextmanager
async def cluster(
    *workers: StubWorker,
    limits: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> AsyncIterator[tuple[Driver, MemoryPlaces]]:
    """Workers that know each other, places on them, and a driver."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
            worker.peers.update({other.worker_id: other for other in workers})
        places = MemoryPlaces(*workers, **options)
        client = await stack.enter_async_context(worker_client(silence_seconds=2.0))
        yield driver(places, client, clock, **(limits or {})), places
        assert places.is_empty
        for worker in workers:
            await worker.until_idle()


def prefill_and_decode(text: str = LONG, **decode: Any) -> tuple[StubWorker, StubWorker]:
    return (
        StubWorker("p", Role.PREFILL, "pe", answer=say(text)),
        StubWorker("d", Role.DECODE, "de", answer=say(text), **decode),
    )


async def test_every_block_is_placed_anew() -> None:
    one = StubWorker("a", epoch="ae", answer=say(LONG))
    two = StubWorker("b", epoch="be", answer=say(LONG))
    client = Client()
    async with cluster(one, two) as (driven, _):
        answer = await driven.run(job(max_tokens=128), client.emit)
    starts = one.starts + two.starts
    assert client.text == LONG
    assert answer.finish_reason == "stop"
    assert answer.num_tokens == len(LONG)
    assert sorted((s.key.block, s.key.attempt) for s in starts) == [(0, 1), (1, 1), (2, 1)]
    assert answer.timings.num_blocks == 3
    assert [len(where) for where in answer.timings.placements] == [1, 1, 1]


async def test_an_answer_that_ends_early_runs_no_later_blocks() -> None:
    worker = StubWorker(answer=say("short"))
    client = Client()
    async with cluster(worker) as (driven, _):
        answer = await driven.run(job(max_tokens=256), client.emit)
    assert client.text == "short"
    assert (answer.finish_reason, answer.num_tokens) == ("stop", 5)
    assert len(worker.starts) == 1


async def test_max_tokens_within_a_block_cuts_the_answer_there() -> None:
    worker = StubWorker(answer=say(LONG))
    client = Client()
    async with cluster(worker) as (driven, _):
        answer = await driven.run(job(max_tokens=40), client.emit)
    assert client.text == LONG[:40]
    assert (answer.finish_reason, answer.num_tokens) == ("length", 40)
    assert worker.starts[0].geometry.num_blocks == 2


async def test_a_cut_block_s_passes_count_in_the_timings_too() -> None:
    worker = StubWorker(answer=say(LONG))
    async with cluster(worker) as (driven, _):
        answer = await driven.run(job(max_tokens=31), Client().emit)
    timings = answer.timings
    assert timings.num_steps == len(timings.commit_counts[0]) > 1
    assert timings.decode_seconds == pytest.approx(0.004 * (timings.num_steps - 1))


async def test_ignored_end_tokens_give_exactly_max_tokens() -> None:
    worker = StubWorker(answer=say("short"))
    decoding = Decoding(eos_ids=(EOS,), eos_rule=EosRule.IGNORE)
    async with cluster(worker) as (driven, _):
        answer = await driven.run(job(max_tokens=70, decoding=decoding), Client().emit)
    assert (answer.finish_reason, answer.num_tokens) == ("length", 70)
    assert len(worker.starts) == 3


async def test_a_stop_string_cancels_the_block_under_way() -> None:
    async def hang(start: BlockStart, step: int) -> None:
        if step == 2:
            await asyncio.Event().wait()

    worker = StubWorker(answer=say("x stop here"), before_pass=hang)
    client = Client()
    async with cluster(worker) as (driven, _):
        answer = await asyncio.wait_for(driven.run(job(stops=("top", "zz")), client.emit), 5)
    assert client.text == "x s"
    assert (answer.finish_reason, answer.num_tokens) == ("stop", len("x stop"))
    assert [key.block for key in worker.dropped] == [0]


async def test_text_settles_in_order_although_commits_do_not() -> None:
    worker = StubWorker(answer=say(LONG))
    client = Client()
    async with cluster(worker) as (driven, _):
        await driven.run(job(max_tokens=96), client.emit)
    positions = [d.commit.position for delta in client.deltas for d in delta.denoised]
    assert positions != sorted(positions)
    assert sorted(positions) == list(range(2, 2 + 96))
    text = ""
    for delta in client.deltas:
        text += delta.text
        assert LONG.startswith(text)
        assert delta.num_tokens == len(text)


# -- disaggregated ------------------------------------------------------------------------------


async def test_a_prefilled_block_moves_to_a_decode_worker() -> None:
    prefill, decode = prefill_and_decode()
    client = Client()
    async with cluster(prefill, decode) as (driven, _):
        answer = await driven.run(job(max_tokens=96), client.emit)
    assert client.text == LONG
    assert [s.hands_over for s in prefill.starts] == [True, True, True]
    first = decode.starts[0]
    assert first.source is not None
    assert (first.source.worker_id, first.source.epoch) == ("p", "pe")
    assert first.resume is not None
    assert (first.resume.step, first.resume.commits) == (1, ())
    assert sum(token != 261 for token in first.ids) == 2 + 8
    assert answer.timings.transfer_seconds == pytest.approx(0.009)
    assert answer.timings.placements == [["p", "d"]] * 3
    assert answer.timings.commit_counts == [[8, 8, 8, 8]] * 3
    assert answer.timings.decode_seconds == pytest.approx(3 * 3 * 0.004)


async def test_waiting_is_told_apart_by_what_it_was_for() -> None:
    seconds = 0.0
    prefill, decode = prefill_and_decode("hello")
    async with cluster(prefill, decode, total_pages=5, clock=lambda: seconds) as (driven, places):

        def keep_the_second_waiting(for_seconds: float, num_prefills: int) -> Hook:
            async def hook(start: BlockStart, step: int) -> None:
                nonlocal seconds
                if start.key.request_id == "first":
                    await places.until(
                        lambda: len(prefill.starts) == num_prefills and bool(places.waiting)
                    )
                    seconds += for_seconds

            return hook

        prefill.before_pass = keep_the_second_waiting(7.0, num_prefills=1)
        decode.before_pass = keep_the_second_waiting(10.0, num_prefills=2)
        async with asyncio.TaskGroup() as group:
            runs = [
                group.create_task(
                    driven.run(job(request_id=name, arrival_seconds=arrival), Client().emit)
                )
                for name, arrival in (("first", 1.0), ("second", 2.0))
            ]
    told = [
        (t.prefill_queueing_seconds, t.decode_queueing_seconds, t.queueing_seconds)
        for t in (run.result().timings for run in runs)
    ]
    assert told[0] == pytest.approx((0.001, 0.005, 0.006))
    assert told[1] == pytest.approx((7.001, 10.005, 17.006))


async def test_a_block_that_its_prefill_completes_never_moves() -> None:
    prefill, decode = prefill_and_decode()
    prefill.answer = lambda start: [EOS] * start.geometry.geometry().mask_buffer_tokens
    async with cluster(prefill, decode) as (driven, _):
        answer = await driven.run(job(), Client().emit)
    assert not decode.starts
    assert answer.num_tokens == 0
    assert answer.finish_reason == "stop"


async def test_the_senders_pages_are_free_once_the_kv_has_left() -> None:
    prefill, decode = prefill_and_decode("word " * 6)
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def hold(start: BlockStart, step: int) -> None:
        if step == 2:
            arrived.set()
            await go_on.wait()

    decode.before_pass = hold
    async with cluster(prefill, decode) as (driven, places):
        run = asyncio.create_task(driven.run(job(max_tokens=32), Client().emit))
        await asyncio.wait_for(arrived.wait(), 5)
        await places.until(lambda: places.seats["p"].load().free_pages == 100)
        assert places.seats["d"].load().free_pages < 100
        go_on.set()
        await run


async def test_the_next_block_does_not_wait_for_the_sender_s_last_word() -> None:
    prefill, decode = prefill_and_decode()

    async def never(key: BlockKey) -> None:
        await asyncio.Event().wait()

    prefill.before_kv_sent = never
    client = Client()
    async with cluster(prefill, decode, limits={"settle_seconds": 60.0}) as (driven, places):
        async with asyncio.timeout(5):
            await driven.run(job(max_tokens=96), client.emit)
        assert places.is_empty
    assert client.text == LONG


async def test_a_refused_decode_goes_to_another_worker_without_a_new_prefill() -> None:
    prefill, decode = prefill_and_decode("hello")
    other = StubWorker("d2", Role.DECODE, "d2e", answer=say("hello"))
    decode.refusals.append("no_pages")
    other.refusals.append("draining")
    client = Client()
    async with cluster(prefill, decode, other) as (driven, _):
        await driven.run(job(), client.emit)
    assert client.text == "hello"
    assert len(prefill.starts) == 1
    assert len(decode.starts) + len(other.starts) == 3


# -- cache none ---------------------------------------------------------------------------------


async def test_without_a_cache_only_colocated_workers_serve_and_no_pages_are_held() -> None:
    prefill, decode = prefill_and_decode("hello")
    colocated = StubWorker("c", answer=say("hello"))
    seen: list[int] = []
    async with cluster(prefill, decode, colocated) as (driven, places):

        async def look(start: BlockStart, step: int) -> None:
            seen.append(places.seats["c"].load().free_pages)

        colocated.before_pass = look
        decoding = Decoding(cache="none", eos_ids=(EOS,))
        await driven.run(job(decoding=decoding), Client().emit)
    assert not prefill.starts
    assert set(seen) == {100}


# -- limits -------------------------------------------------------------------------------------


async def test_a_request_ends_at_its_deadline_and_frees_everything() -> None:
    async def never(start: BlockStart, step: int) -> None:
        await asyncio.Event().wait()

    worker = StubWorker(before_pass=never)
    async with cluster(worker, limits={"request_seconds": 0.2}) as (driven, _):
        with pytest.raises(DeadlineExceeded):
            await driven.run(job(), Client().emit)
    assert len(worker.dropped) == 1


async def test_requests_wait_for_pages_in_order_of_arrival() -> None:
    worker = StubWorker(answer=say("hello"))
    order: list[str] = []

    async def note(start: BlockStart, step: int) -> None:
        if step == 0:
            order.append(start.key.request_id)

    worker.before_pass = note
    async with cluster(worker, total_pages=3) as (driven, _):
        jobs = [job(max_tokens=32, request_id=f"r{i}", arrival_seconds=i) for i in range(5)]
        async with asyncio.TaskGroup() as group:
            for each in jobs:
                group.create_task(driven.run(each, Client().emit))
    assert order == [each.request_id for each in jobs]


async def test_a_full_line_turns_new_requests_away() -> None:
    hold = asyncio.Event()

    async def wait(start: BlockStart, step: int) -> None:
        await hold.wait()

    worker = StubWorker(before_pass=wait, answer=say("hello"))
    async with cluster(worker, total_pages=5, max_waiting=1) as (driven, places):
        first = asyncio.create_task(driven.run(job(request_id="a"), Client().emit))
        second = asyncio.create_task(
            driven.run(job(request_id="b", arrival_seconds=2.0), Client().emit)
        )
        await places.until(lambda: bool(places.waiting))
        with pytest.raises(Overloaded):
            await driven.run(job(request_id="c", arrival_seconds=3.0), Client().emit)
        hold.set()
        await asyncio.gather(first, second)


async def test_without_any_worker_a_request_is_told_so() -> None:
    async with cluster(patience_seconds=0.05) as (driven, _):
        with pytest.raises(Unavailable):
            await driven.run(job(), Client().emit)
