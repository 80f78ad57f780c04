"""The internal API over real sockets, with the toy engine."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from tests.worker.fakes import ToyEngine, ToyPool, toy_answer
from tests.worker.harness import (
    TOKEN,
    Client,
    a_client,
    a_sequence,
    a_start,
    a_worker,
    eventually,
)

from sangam_core.answer import Completion
from sangam_core.decoding import Commit, Decoding, Resume, Unmasking, UnmaskingRule
from sangam_core.placement import Role
from sangam_core.wire import (
    PROTOCOL_VERSION,
    Completed,
    KVSource,
    Lost,
    PassRan,
    Ping,
    Prefilled,
    Queued,
    WireGeometry,
)
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


# -- refusals -----------------------------------------------------------------------------------


async def code_of(worker: Worker, **changes: Any) -> str:
    async with a_client() as client:
        status, body = await client.refused(worker, a_start(worker, **changes))
        assert status == 409, body
        assert body["message"]
        return str(body["code"])


def a_source() -> KVSource:
    return KVSource(worker_id="other", epoch="e", url="http://127.0.0.1:1")


async def test_another_epoch_is_refused() -> None:
    async with a_worker() as worker:
        assert await code_of(worker, worker_epoch="former") == "wrong_epoch"


async def test_a_prefill_worker_takes_only_blocks_that_it_hands_over() -> None:
    async with a_worker(role=Role.PREFILL) as worker:
        assert await code_of(worker) == "wrong_role"
        resume = Resume(step=1, initial_masks=16)
        assert await code_of(worker, source=a_source(), resume=resume) == "wrong_role"


async def test_a_decode_worker_takes_only_blocks_with_a_source() -> None:
    async with a_worker(role=Role.DECODE) as worker:
        assert await code_of(worker) == "wrong_role"
        assert await code_of(worker, hands_over=True) == "wrong_role"


async def test_a_block_that_is_here_is_refused_as_a_duplicate() -> None:
    async with a_worker(role=Role.PREFILL) as worker, a_client() as client:
        run = await client.start(worker, a_start(worker, hands_over=True))
        await run.until(PassRan)
        assert await code_of(worker, hands_over=True) == "duplicate"
        run.response.close()


async def test_a_block_larger_than_the_pool_never_fits() -> None:
    async with a_worker(ToyEngine(kv_pool=ToyPool(total_pages=3))) as worker:
        assert await code_of(worker) == "never_fits"


async def test_a_decode_without_free_pages_is_refused_and_leaves_nothing() -> None:
    engine = ToyEngine(kv_pool=ToyPool(total_pages=6))
    async with a_worker(engine, role=Role.COLOCATED) as worker, a_client() as client:
        run = await client.start(worker, a_start(worker, hands_over=True))
        await run.until(PassRan)
        resume = Resume(step=1, initial_masks=16)
        code = await code_of(worker, request_id="other", source=a_source(), resume=resume)
        assert code == "no_pages"
        run.response.close()
        await client.becomes_idle(worker)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"ids": a_sequence()[:-1]}, "ids"),
        ({"ids": [9999, *a_sequence()[1:]]}, "ids"),
        ({"ids": [7] * 52}, "ids"),
        ({"block": 2}, "key"),
        ({"decoding": Decoding(cache="magic")}, "cache"),
        ({"hands_over": True, "decoding": Decoding(cache="none")}, "cache"),
        ({"decoding": Decoding(unmasking=Unmasking(rule=UnmaskingRule.ENTROPY))}, "unmasking"),
        ({"source": a_source()}, "resume"),
        (
            {
                "ids": [7] * 4990 + [1] * 32,
                "geometry": WireGeometry(prompt_tokens=4990, num_blocks=2, block_length=16),
            },
            "geometry",
        ),
    ],
)
async def test_a_bad_block_gets_400_with_the_field_s_name(
    changes: dict[str, Any], param: str
) -> None:
    engine = ToyEngine(kv_pool=ToyPool(total_pages=400))
    async with a_worker(engine) as worker, a_client() as client:
        status, body = await client.refused(worker, a_start(worker, **changes))
        assert status == 400, body
        assert body["param"] == param
        assert await client.is_idle(worker)


async def test_a_malformed_body_gets_400_with_the_field_s_name() -> None:
    async with a_worker() as worker, a_client() as client:
        good = json.loads(a_start(worker).model_dump_json())
        status, body = await client.refused(worker, json.dumps(good | {"surprise": 1}))
        assert (status, body["param"]) == (400, "surprise")
        status, body = await client.refused(worker, json.dumps(good | {"deadline_seconds": -1}))
        assert (status, body["param"]) == (400, "deadline_seconds")
        status, body = await client.refused(worker, "{")
        assert status == 400
        assert "JSON" in body["message"]


async def test_another_protocol_gets_426_whatever_its_body_looks_like() -> None:
    async with a_worker() as worker, a_client() as client:
        status, body = await client.refused(worker, a_start(worker, protocol=PROTOCOL_VERSION + 1))
        assert (status, body["param"]) == (426, "protocol")
        status, body = await client.refused(
            worker, json.dumps({"protocol": PROTOCOL_VERSION + 2, "new": "shape"})
        )
        assert status == 426


# -- the guard ----------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x"])
async def test_a_wrong_token_gets_401_and_probes_need_none(token: str | None) -> None:
    headers = {} if token is None else {"x-sangam-token": token}
    async with a_worker() as worker, aiohttp.ClientSession(headers=headers) as session:
        for method, path in (("GET", BLOCKS), ("POST", BLOCKS), ("POST", "/internal/v1/drain")):
            async with session.request(method, worker.url + path) as response:
                assert response.status == 401
        for path in ("/healthz", "/metrics"):
            async with session.get(worker.url + path) as response:
                assert response.status == 200
        assert not worker.standing.is_draining


async def raw(worker: Worker, request: bytes) -> bytes:
    """Send bytes, read the answer until the connection ends or the deadline comes."""
    host, _, port = worker.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def post_head(*headers: str) -> bytes:
    lines = ["POST /internal/v1/blocks HTTP/1.1", "host: x", f"x-sangam-token: {TOKEN}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


async def test_length_and_chunks_in_one_request_are_refused_and_the_connection_closed() -> None:
    async with a_worker() as worker:
        head = post_head("content-length: 5", "transfer-encoding: chunked")
        answer = await raw(worker, head + b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"connection: close" in answer.lower()


async def test_a_body_that_is_too_large_gets_413_by_its_length_or_as_it_comes() -> None:
    async with a_worker(max_body_bytes=1024) as worker:
        answer = await raw(worker, post_head("content-length: 2000"))
        assert answer.startswith(b"HTTP/1.1 413")
        chunk = b"%x\r\n" % 700 + b"x" * 700 + b"\r\n"
        answer = await raw(worker, post_head("transfer-encoding: chunked") + chunk * 2)
        assert answer.startswith(b"HTTP/1.1 413")


async def test_a_body_that_never_ends_gets_408() -> None:
    async with a_worker(body_deadline_seconds=0.1) as worker:
        answer = await raw(worker, post_head("content-length: 100") + b"{")
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer.lower()


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
        assert await code_of(worker) == "draining"


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
