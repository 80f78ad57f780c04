"""The internal API over real sockets, with the toy engine: blocks, cancelling, listing, probes."""

import asyncio

from tests.worker.fakes import ToyEngine, toy_answer
from tests.worker.harness import Client, a_client, a_sequence, a_start, a_worker, eventually

from sangam_core.answer import Completion
from sangam_core.decoding import Commit, Decoding, Resume
from sangam_core.placement import Role
from sangam_core.wire import Completed, Lost, PassRan, Ping, Prefilled, Queued
from sangam_worker.process import Worker

BLOCK_0 = range(20, 36)
BLOCKS = "/internal/v1/blocks"


def held_up() -> ToyEngine:
    """An engine that computes nothing until its gate is opened."""
    engine = ToyEngine()
    engine.gate.clear()
    return engine


async def has_been_abandoned(client: Client, worker: Worker) -> None:
    async def is_noticed() -> bool:
        return await client.metric(worker, "sangam_worker_abandoned_streams_total") == 1

    await eventually(is_noticed)


# -- a block's life ---------------------------------------------------------------------------


async def test_a_block_runs_in_place_and_streams_every_event() -> None:
    async with a_worker() as worker, a_client() as client:
        run = await client.start(worker, a_start(worker))
        assert await run.rest() == ["queued", "prefilled", "pass", "pass", "completed"]
        assert run.tokens() == toy_answer(a_sequence(), BLOCK_0)
        passes = [event for event in run.events if isinstance(event, PassRan)]
        assert [event.step for event in passes] == [0, 1]
        assert [event.completion for event in passes] == [Completion.NOTHING, Completion.BLOCK]
        assert [event.carry for event in passes] == [8.0, 16.0]
        done = run.events[-1]
        assert isinstance(done, Completed)
        assert done.num_passes == 2
        assert await client.is_idle(worker)


async def test_a_stream_is_ndjson_and_ends_with_the_block() -> None:
    async with a_worker() as worker, a_client() as client:
        run = await client.start(worker, a_start(worker))
        assert run.response.headers["content-type"].startswith("application/x-ndjson")
        await run.rest()
        assert run.response.content.at_eof()


async def test_many_blocks_at_once_give_what_each_gives_alone() -> None:
    async with a_worker() as worker, a_client() as client:
        sequences = [[10 + n, *a_sequence()[1:]] for n in range(12)]
        runs = [
            await client.start(worker, a_start(worker, f"r{n}", ids=ids))
            for n, ids in enumerate(sequences)
        ]
        await asyncio.gather(*(run.rest() for run in runs))
        for run, ids in zip(runs, sequences, strict=True):
            assert run.tokens() == toy_answer(ids, BLOCK_0)
        assert await client.is_idle(worker)


async def test_a_lost_block_goes_on_where_it_stopped() -> None:
    whole = toy_answer(a_sequence(), BLOCK_0)
    before = tuple(Commit(position=20 + i, token=whole[i]) for i in range(8))
    resume = Resume(step=1, initial_masks=16, commits=before, carry=8.0)
    async with a_worker() as worker, a_client() as client:
        run = await client.start(worker, a_start(worker, resume=resume))
        assert await run.rest() == ["queued", "prefilled", "pass", "completed"]
        event = run.events[2]
        assert isinstance(event, PassRan)
        assert (event.step, event.carry) == (1, 16.0)
        assert run.tokens() == whole[8:]


async def test_a_block_without_cache_runs_in_whole_passes() -> None:
    async with a_worker() as worker, a_client() as client:
        run = await client.start(worker, a_start(worker, decoding=Decoding(cache="none")))
        assert await run.rest() == ["queued", "prefilled", "pass", "pass", "completed"]
        assert run.tokens() == toy_answer(a_sequence(), BLOCK_0)


async def test_prefilled_tells_how_long_the_queue_and_the_prefill_took() -> None:
    engine = held_up()
    async with a_worker(engine) as worker, a_client() as client:
        first = await client.start(worker, a_start(worker, "first"))
        await eventually(lambda: engine.num_iterations == 1)
        second = await client.start(worker, a_start(worker, "second"))
        assert isinstance(await second.next(), Queued)
        await asyncio.get_running_loop().run_in_executor(None, engine.gate.wait, 0.1)
        engine.gate.set()
        event = await second.until(Prefilled)
        assert isinstance(event, Prefilled)
        assert event.queue_seconds >= 0.1
        assert 0 <= event.prefill_seconds < event.queue_seconds
        await first.rest()
        await second.rest()


async def test_a_quiet_stream_pings() -> None:
    engine = held_up()
    async with a_worker(engine, ping_seconds=0.05) as worker, a_client() as client:
        run = await client.start(worker, a_start(worker))
        assert isinstance(await run.next_line(), Queued)
        assert isinstance(await run.next_line(), Ping)
        assert isinstance(await run.next_line(), Ping)
        engine.gate.set()
        assert (await run.rest())[-1] == "completed"


# -- cancelling ---------------------------------------------------------------------------------


async def test_closing_the_stream_of_a_queued_block_frees_it() -> None:
    engine = held_up()
    async with a_worker(engine) as worker, a_client() as client:
        running = await client.start(worker, a_start(worker, "running"))
        await eventually(lambda: engine.num_iterations == 1)
        queued = await client.start(worker, a_start(worker, "queued"))
        await queued.next()
        queued.response.close()
        await has_been_abandoned(client, worker)
        engine.gate.set()
        await running.rest()
        await client.becomes_idle(worker)
        assert engine.num_iterations == 2, "the cancelled block ran"


async def test_closing_the_stream_of_a_decoding_block_frees_its_pages() -> None:
    engine = ToyEngine(commits_per_pass=1, closes_after=2)
    async with a_worker(engine) as worker, a_client() as client:
        run = await client.start(worker, a_start(worker))
        await run.until(PassRan)
        run.response.close()
        await has_been_abandoned(client, worker)
        engine.gate.set()
        await client.becomes_idle(worker)
        metric = 'sangam_worker_block_outcomes_total{outcome="cancelled"}'
        assert await client.metric(worker, metric) == 1


async def test_closing_the_stream_of_a_held_block_frees_its_pages() -> None:
    async with a_worker(role=Role.PREFILL) as worker, a_client() as client:
        run = await client.start(worker, a_start(worker, hands_over=True))
        await run.until(PassRan)
        (held,) = (await client.held(worker)).blocks
        assert (held.stage, held.num_pages) == ("holding", 4)
        run.response.close()
        await client.becomes_idle(worker)


async def test_deleting_a_block_ends_its_stream_and_may_be_repeated() -> None:
    async with a_worker(role=Role.PREFILL) as worker, a_client() as client:
        run = await client.start(worker, a_start(worker, hands_over=True))
        await run.until(PassRan)
        for _ in range(2):
            async with client.http.delete(f"{worker.url}{BLOCKS}/r1/0/1") as response:
                assert response.status == 204
        assert (await run.rest())[-1] == "lost"
        lost = run.events[-1]
        assert isinstance(lost, Lost)
        assert lost.reason.code == "cancelled"
        assert await client.is_idle(worker)


async def test_a_request_id_may_hold_slashes() -> None:
    async with a_worker(role=Role.PREFILL) as worker, a_client() as client:
        run = await client.start(worker, a_start(worker, "a/b c", hands_over=True))
        await run.until(PassRan)
        async with client.http.delete(f"{worker.url}{BLOCKS}/a%2Fb%20c/0/1") as response:
            assert response.status == 204
        assert await client.is_idle(worker)


async def test_a_deadline_drops_the_block() -> None:
    async with a_worker(role=Role.PREFILL) as worker, a_client() as client:
        start = a_start(worker, hands_over=True, deadline_seconds=0.2)
        run = await client.start(worker, start)
        assert (await run.rest())[-1] == "lost"
        lost = run.events[-1]
        assert isinstance(lost, Lost)
        assert lost.reason.code == "deadline"
        assert await client.is_idle(worker)


async def test_an_engine_failure_loses_its_blocks_and_the_worker_goes_on() -> None:
    engine = ToyEngine(failures=[RuntimeError("the device hiccuped")])
    async with a_worker(engine) as worker, a_client() as client:
        run = await client.start(worker, a_start(worker, "first"))
        assert await run.rest() == ["queued", "lost"]
        lost = run.events[-1]
        assert isinstance(lost, Lost)
        assert lost.reason.code == "engine_error"
        assert "the device hiccuped" in lost.reason.message
        assert await client.is_idle(worker)
        second = await client.start(worker, a_start(worker, "second"))
        assert (await second.rest())[-1] == "completed"
        assert (await client.get(worker, "/healthz"))[0] == 200


# -- listing ------------------------------------------------------------------------------------


async def test_the_list_says_what_each_block_holds_and_still_costs() -> None:
    engine = held_up()
    async with a_worker(engine, total_pages=64) as worker, a_client() as client:
        async with asyncio.TaskGroup() as group:
            runs = [await client.start(worker, a_start(worker, name)) for name in ("a", "b")]
            await eventually(lambda: engine.num_iterations == 1)
            listing = group.create_task(client.held(worker))
            await asyncio.sleep(0)
            engine.gate.set()
        held = listing.result()
        assert held.worker_id == worker.standing.worker_id
        assert held.epoch == worker.standing.epoch
        assert held.total_pages == 64
        for block in held.blocks:
            assert block.needed_pages == 4
            assert block.prefill_tokens in (0, 52)
        for run in runs:
            await run.rest()


# -- probes ---------------------------------------------------------------------------------------


async def test_repeated_engine_failures_make_the_worker_sick_and_refuse_work() -> None:
    engine = ToyEngine(failures=[RuntimeError("broken")] * 3)
    async with a_worker(engine, max_engine_failures=3) as worker, a_client() as client:
        for name in ("a", "b", "c"):
            assert (await client.get(worker, "/healthz"))[0] == 200
            run = await client.start(worker, a_start(worker, name))
            assert (await run.rest())[-1] == "lost"
        status, body = await client.get(worker, "/healthz")
        assert status == 503
        assert "broken" in body["reason"]
        refused, body = await client.refused(worker, a_start(worker))
        assert (refused, body["code"]) == (409, "draining")


async def test_a_hung_iteration_makes_the_worker_sick() -> None:
    engine = held_up()
    async with a_worker(engine, engine_stall_seconds=0.05) as worker, a_client() as client:
        run = await client.start(worker, a_start(worker))

        async def is_sick() -> bool:
            return (await client.get(worker, "/healthz"))[0] == 503

        await eventually(is_sick)
        engine.gate.set()
        assert (await run.rest())[-1] == "completed"
        assert not await is_sick()


async def test_readiness_says_why_not() -> None:
    async with a_worker() as worker, a_client() as client:
        status, body = await client.get(worker, "/readyz")
        assert status == 503
        assert any("no lease in Redis" in reason for reason in body["reasons"])


async def test_metrics_count_iterations_tokens_and_outcomes() -> None:
    async with a_worker() as worker, a_client() as client:
        run = await client.start(worker, a_start(worker))
        await run.rest()
        for sample, value in {
            "sangam_worker_iterations_total": 2,
            "sangam_worker_iteration_seconds_count": 2,
            "sangam_worker_prefill_tokens_total": 52,
            "sangam_worker_decode_tokens_total": 16,
            "sangam_worker_committed_tokens_total": 16,
            "sangam_worker_queue_seconds_count": 1,
            "sangam_worker_free_pages": 64,
            "sangam_worker_total_pages": 64,
            "sangam_worker_running_blocks": 0,
            'sangam_worker_block_outcomes_total{outcome="completed"}': 1,
            'sangam_worker_role{role="colocated"}': 1,
            'sangam_worker_role{role="prefill"}': 0,
        }.items():
            assert await client.metric(worker, sample) == value, sample
