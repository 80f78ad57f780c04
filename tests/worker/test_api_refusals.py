"""What the internal API refuses, and how: blocks, bodies, tokens."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from starlette.types import Message, Receive, Scope, Send
from tests.worker.fakes import ToyEngine, ToyPool
from tests.worker.harness import TOKEN, a_client, a_sequence, a_start, a_worker

from sangam_core.decoding import Decoding, Resume, Unmasking, UnmaskingRule
from sangam_core.placement import Role
from sangam_core.wire import PROTOCOL_VERSION, KVSource, PassRan, WireGeometry
from sangam_worker.api.guard import Guard
from sangam_worker.process import Worker

BLOCKS = "/internal/v1/blocks"


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


async def test_a_sequence_longer_than_the_worker_takes_never_fits() -> None:
    engine = ToyEngine(kv_pool=ToyPool(total_pages=400))
    geometry = WireGeometry(prompt_tokens=4090, num_blocks=1, block_length=16)
    async with a_worker(engine) as worker, a_client() as client:
        ids = [7] * 4090 + [1] * 16
        status, body = await client.refused(worker, a_start(worker, ids=ids, geometry=geometry))
        assert (status, body["code"]) == (409, "never_fits")
        assert "4106 tokens, this worker takes 4096" in body["message"]
        assert await client.is_idle(worker)


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


@pytest.mark.parametrize("depth", [500, *range(900, 1000, 4), 100_000])
async def test_a_body_nested_however_deeply_is_refused_by_what_is_wrong_with_it(
    depth: int,
) -> None:
    async with a_worker() as worker, a_client() as client:
        status, body = await client.refused(worker, "[" * depth + "]" * depth)
        assert status == 400
        nested = '{"protocol": ' + "[" * depth + "]" * depth + "}"
        status, body = await client.refused(worker, nested)
        assert status in (400, 426)
        assert len(body["message"]) < 200


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


async def test_a_body_that_the_worker_s_end_cuts_off_is_503_and_no_error_to_log() -> None:
    is_reading = asyncio.Event()
    sent: list[Message] = []

    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("half a request came through")

    async def receive() -> Message:
        is_reading.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    guard = Guard(never, token=TOKEN, max_body_bytes=100, body_deadline_seconds=10.0)
    headers = [(b"x-sangam-token", TOKEN.encode()), (b"content-length", b"50")]
    scope = {"type": "http", "path": BLOCKS, "headers": headers}
    serving = asyncio.create_task(guard(scope, receive, send))
    await asyncio.wait_for(is_reading.wait(), 5)
    serving.cancel()
    await asyncio.wait_for(serving, 5)
    assert sent[0]["status"] == 503
    assert (b"connection", b"close") in sent[0]["headers"]
