"""The driver when things break: every loss is made good, and every ending frees everything."""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable

import pytest
from tests.router.builders import driver, job, worker_client
from tests.router.stub_worker import BlockIsLost, ConnectionBreaks, StubWorker, say
from tests.router.test_driver import LONG, Client, cluster, prefill_and_decode

from sangam_core.errors import Unavailable
from sangam_core.placement import Role
from sangam_core.wire import BlockKey, BlockStart, Refusal
from sangam_router.worker_client import BlockStream, WorkerClient

Hook = Callable[[BlockStart, int], Awaitable[None]]


def fails_once(at_step: int, error: type[Exception], block: int = 0) -> Hook:
    """A hook that raises before a pass of the block, the first time."""
    is_done = False

    async def hook(start: BlockStart, step: int) -> None:
        nonlocal is_done
        if (start.key.block, step) == (block, at_step) and not is_done:
            is_done = True
            raise error("on purpose")

    return hook


@pytest.mark.parametrize("error", [ConnectionBreaks, BlockIsLost])
@pytest.mark.parametrize("at_step", [0, 1, 3])
async def test_a_lost_block_goes_on_elsewhere_and_the_client_sees_one_answer(
    at_step: int, error: type[Exception]
) -> None:
    hook = fails_once(at_step, error, block=1)
    workers = [StubWorker(name, epoch=f"{name}e", answer=say(LONG)) for name in "ab"]
    for worker in workers:
        worker.before_pass = hook
    client = Client()
    async with cluster(*workers) as (driven, _):
        answer = await driven.run(job(max_tokens=96), client.emit)
    assert client.text == LONG
    assert answer.timings.num_retries == 1
    assert answer.timings.commit_counts == [[8, 8, 8, 8]] * 3
    second = [s for w in workers for s in w.starts if s.key.block == 1]
    lost, again = sorted(second, key=lambda start: start.key.attempt)
    assert again.ids == lost.ids, "the block starts from its start"
    assert again.worker_epoch != lost.worker_epoch, "another worker gets it"
    if at_step == 0:
        assert again.resume is None
    else:
        assert again.resume is not None
        assert again.resume.step == at_step
        assert again.resume.initial_masks == 32
        assert len(again.resume.commits) == 8 * at_step
        assert again.resume.carry == pytest.approx((at_step - 1) / 10)
    positions = [d.commit.position for delta in client.deltas for d in delta.denoised]
    assert len(positions) == len(set(positions)), "no commit is told twice"


async def test_the_only_worker_gets_the_block_again() -> None:
    worker = StubWorker(answer=say(LONG), before_pass=fails_once(2, ConnectionBreaks))
    client = Client()
    async with cluster(worker) as (driven, _):
        await driven.run(job(max_tokens=96), client.emit)
    assert client.text == LONG


async def test_a_worker_that_cannot_be_reached_is_passed_over() -> None:
    gone, there = StubWorker("a", epoch="ae"), StubWorker("b", epoch="be")
    client = Client()
    async with cluster(gone, there) as (driven, _):
        await gone.stop()
        for index in range(4):
            await driven.run(job(request_id=f"r{index}"), client.emit)
    assert client.text == "hello" * 4


@pytest.mark.parametrize("code", ["no_pages", "wrong_epoch", "wrong_role", "draining", "duplicate"])
async def test_a_refused_block_is_placed_again_under_a_new_key(code: str) -> None:
    worker = StubWorker()
    worker.refusals.extend([code, code])
    client = Client()
    async with cluster(worker) as (driven, _):
        answer = await driven.run(job(), client.emit)
    assert client.text == "hello"
    assert [start.key.attempt for start in worker.starts] == [1, 2, 3]
    assert answer.timings.num_retries == 2


async def test_a_worker_whose_lease_is_gone_loses_its_blocks() -> None:
    reached = asyncio.Event()

    async def hang(start: BlockStart, step: int) -> None:
        reached.set()
        await asyncio.Event().wait()

    silent = StubWorker("a", epoch="ae", before_pass=hang)
    client = Client()
    async with cluster(silent) as (driven, places):
        run = asyncio.create_task(driven.run(job(), client.emit))
        await asyncio.wait_for(reached.wait(), 5)
        silent.before_pass = fails_once(99, ConnectionBreaks)
        places.seats["a"].lost.set()
        places.seats["a"].lost = asyncio.Event()
        await asyncio.wait_for(run, 5)
    assert client.text == "hello"


async def test_a_worker_that_falls_silent_loses_its_blocks() -> None:
    hung = False

    async def hang_once(start: BlockStart, step: int) -> None:
        nonlocal hung
        if not hung:
            hung = True
            await asyncio.Event().wait()

    worker = StubWorker(before_pass=hang_once)
    client = Client()
    async with cluster(worker) as (driven, _):  # silent for 2 s
        await asyncio.wait_for(driven.run(job(), client.emit), 10)
    assert client.text == "hello"


async def test_a_worker_that_reports_nonsense_is_not_believed() -> None:
    calls = 0

    def answer(start: BlockStart) -> list[int]:
        nonlocal calls
        calls += 1
        mask = [261] if calls == 1 else [104]
        return (mask * 32) * start.geometry.num_blocks

    worker = StubWorker(answer=answer)
    client = Client()
    async with cluster(worker) as (driven, _):
        result = await driven.run(job(max_tokens=32), client.emit)
    assert client.text == "h" * 32
    assert result.timings.num_retries == 1


async def test_a_request_whose_blocks_are_lost_too_often_fails() -> None:
    async def always(start: BlockStart, step: int) -> None:
        raise ConnectionBreaks

    worker = StubWorker(before_pass=always)
    async with cluster(worker, limits={"max_lost": 3}) as (driven, _):
        with pytest.raises(Unavailable, match="4 lost blocks"):
            await driven.run(job(), Client().emit)
    assert len(worker.starts) == 4


# -- disaggregated ------------------------------------------------------------------------------


async def test_a_decode_worker_that_dies_costs_one_prefill_and_no_byte() -> None:
    prefill, decode = prefill_and_decode(before_pass=fails_once(2, ConnectionBreaks, block=1))
    other = StubWorker("d2", Role.DECODE, "d2e", answer=say(LONG))
    client = Client()
    async with cluster(prefill, decode, other) as (driven, places):
        places.seats["d2"].total_pages = 50  # the second choice
        await driven.run(job(max_tokens=96), client.emit)
    assert client.text == LONG
    resumed = [s for s in prefill.starts if s.resume is not None]
    assert [(s.key.block, s.resume.step) for s in resumed if s.resume] == [(1, 2)]
    taken_up = next(s for s in other.starts if s.key.block == 1)
    assert taken_up.resume is not None
    assert (taken_up.resume.step, taken_up.resume.initial_masks) == (2, 32)
    assert sum(token != 261 for token in taken_up.ids) == 2 + 32 + 16


async def test_a_prefill_worker_that_dies_holding_kv_loses_the_block() -> None:
    prefill, decode = prefill_and_decode("hello")
    other = StubWorker("p2", Role.PREFILL, "p2e", answer=say("hello"))
    first = True

    async def die_first(key: BlockKey) -> None:
        nonlocal first
        if first:
            first = False
            raise ConnectionBreaks

    prefill.before_kv_sent = other.before_kv_sent = die_first
    arrived = asyncio.Event()
    client = Client()
    async with cluster(prefill, other, decode) as (driven, _):

        async def hold_the_first(key: BlockKey) -> None:
            if not arrived.is_set():
                arrived.set()
                await asyncio.Event().wait()

        decode.before_kv_arrived = hold_the_first
        answer = await asyncio.wait_for(driven.run(job(), client.emit), 10)
    assert client.text == "hello"
    assert answer.timings.num_retries == 1
    assert len(prefill.starts) + len(other.starts) == 2


async def test_a_sender_that_dies_after_the_kv_has_arrived_loses_nothing() -> None:
    prefill, decode = prefill_and_decode("word " * 6)

    async def die(key: BlockKey) -> None:
        await decoding.wait()
        raise ConnectionBreaks

    decoding = asyncio.Event()
    prefill.before_kv_sent = die
    client = Client()
    async with cluster(prefill, decode) as (driven, places):

        async def outlive_the_sender(start: BlockStart, step: int) -> None:
            if step == 2:
                decoding.set()
            elif step == 3:
                await places.until(lambda: places.seats["p"].load().free_pages == 100)

        decode.before_pass = outlive_the_sender
        answer = await asyncio.wait_for(driven.run(job(max_tokens=32), client.emit), 5)
    assert client.text == "word " * 6
    assert answer.timings.num_retries == 0


async def test_a_prefill_worker_that_dies_while_the_decode_waits_for_a_place() -> None:
    prefill, decode = prefill_and_decode("hello")
    client = Client()
    async with cluster(prefill, decode) as (driven, places):
        places.seats["d"].is_draining = True
        run = asyncio.create_task(driven.run(job(), client.emit))
        await places.until(lambda: bool(places.waiting))
        places.seats["p"].lost.set()
        places.seats["p"].lost = asyncio.Event()
        await places.until(lambda: len(prefill.starts) == 2)
        places.seats["d"].is_draining = False
        await places.changed()
        answer = await asyncio.wait_for(run, 5)
    assert client.text == "hello"
    assert answer.timings.num_retries == 1


# -- cancellation -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_disaggregated", [False, True])
@pytest.mark.parametrize("num_turns", [*range(30), *range(30, 120, 3)])
async def test_a_client_that_goes_away_at_any_moment_frees_everything(
    num_turns: int, is_disaggregated: bool
) -> None:
    if is_disaggregated:
        workers: tuple[StubWorker, ...] = prefill_and_decode()
    else:
        workers = (StubWorker(answer=say(LONG)),)
    async with cluster(*workers) as (driven, places):
        run = asyncio.create_task(driven.run(job(max_tokens=96), Client().emit))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        was_running = run.cancel()
        await asyncio.wait({run})
        assert run.cancelled() is was_running
        assert places.is_empty


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_client_that_goes_away_just_as_its_block_is_lost_is_gone(num_turns: int) -> None:
    """Before Python 3.12 a task group may swallow a cancellation for an error of a child."""
    prefill, decode = prefill_and_decode()
    async with cluster(prefill, decode) as (driven, places):
        places.seats["d"].is_draining = True
        run = asyncio.create_task(driven.run(job(), Client().emit))
        await places.until(lambda: bool(places.waiting))
        places.seats["p"].lost.set()
        places.seats["p"].lost = asyncio.Event()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        run.cancel()
        await asyncio.wait({run}, timeout=5)
        assert run.cancelled()


@pytest.mark.parametrize("is_disaggregated", [False, True])
async def test_a_storm_of_losses_and_refusals_changes_no_byte(is_disaggregated: bool) -> None:
    chance = random.Random(5)

    async def hook(start: BlockStart, step: int) -> None:
        if chance.random() < 0.08:
            raise chance.choice([ConnectionBreaks, BlockIsLost])
        await asyncio.sleep(0.001 * chance.random())

    def worker(name: str, role: Role) -> StubWorker:
        refusals = chance.choices(["no_pages", "draining", "wrong_epoch"], k=10)
        return StubWorker(
            name, role, f"{name}e", answer=say(LONG), before_pass=hook, refusals=deque(refusals)
        )

    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]
    if not is_disaggregated:
        roles = [Role.COLOCATED] * 3
    workers = [worker(f"w{index}", role) for index, role in enumerate(roles)]
    clients = [Client() for _ in range(30)]
    limits = {"max_lost": 100}
    async with (
        cluster(*workers, total_pages=30, patience_seconds=60, limits=limits) as (driven, _),
        asyncio.timeout(60),
        asyncio.TaskGroup() as group,
    ):
        for index, client in enumerate(clients):
            wish = job(max_tokens=96, request_id=f"r{index:02}", arrival_seconds=index)
            group.create_task(driven.run(wish, client.emit))
    assert {client.text for client in clients} == {LONG}
    assert any(start.resume is not None for w in workers for start in w.starts)


class OneStandsStill:
    """A client to which the first of some workers that it asks never answers."""

    def __init__(self, workers: WorkerClient, *some: StubWorker) -> None:
        self._workers = workers
        self._some = {worker.url: worker.worker_id for worker in some}
        self.frozen: asyncio.Future[str] = asyncio.Future()

    async def open(self, url: str, start: BlockStart) -> BlockStream | Refusal:
        if url in self._some and not self.frozen.done():
            self.frozen.set_result(self._some[url])
            await asyncio.Event().wait()
        return await self._workers.open(url, start)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_worker_that_answers_nobody_holds_a_block_no_longer_than_its_lease(
    role: Role,
) -> None:
    workers = [
        *prefill_and_decode(),
        StubWorker("p2", Role.PREFILL, "p2e", answer=say(LONG)),
        StubWorker("d2", Role.DECODE, "d2e", answer=say(LONG)),
    ]
    client = Client()
    async with cluster(*workers) as (_, places), worker_client() as real:
        asked = OneStandsStill(real, *(each for each in workers if each.role is role))
        run = asyncio.create_task(driver(places, asked).run(job(max_tokens=32), client.emit))
        places.seats[await asyncio.wait_for(asked.frozen, 5)].lost.set()
        answer = await asyncio.wait_for(run, 5)
    assert client.text == LONG[:32]
    assert answer.timings.num_retries == 1
