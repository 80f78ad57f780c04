"""The client of the workers' internal API: broken streams are losses, refusals are values."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from tests.router.builders import worker_client
from tests.router.stub_worker import TOKEN

from sangam_core.decoding import Decoding
from sangam_core.errors import BlockLost, InvalidRequest
from sangam_core.wire import (
    PROTOCOL_VERSION,
    BlockKey,
    BlockStart,
    Ping,
    Queued,
    Refusal,
    WireGeometry,
)
from sangam_router.worker_client import BlockStream, HttpWorkerClient

START = BlockStart(
    key=BlockKey(request_id="r", block=0, attempt=1),
    worker_epoch="e",
    arrival_seconds=1.0,
    ids=(1,) * 33,
    geometry=WireGeometry(prompt_tokens=1, num_blocks=1, block_length=32),
    decoding=Decoding(),
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def a_worker(handler: Handler) -> AsyncIterator[str]:
    """Serves one handler for block starts; yields its URL."""
    app = web.Application()
    app.router.add_post("/internal/v1/blocks", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def sends(*pieces: bytes, then: Callable[[web.Request], Awaitable[None]] | None = None) -> Handler:
    """A handler that streams pieces of bytes as they are."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.005)
        if then is not None:
            await then(request)
        return response

    return handler


@asynccontextmanager
async def a_stream(handler: Handler, **options: float) -> AsyncIterator[BlockStream]:
    """The stream of a block on a worker with that handler."""
    async with (
        a_worker(handler) as url,
        worker_client(**options) as client,
        await opened(client, url) as stream,
    ):
        yield stream


async def opened(client: HttpWorkerClient, url: str) -> BlockStream:
    stream = await client.open(url, START)
    assert not isinstance(stream, Refusal)
    return stream


async def test_events_are_read_however_their_lines_are_cut() -> None:
    pieces = (b'{"type":"que', b'ued"}\n{"type":"ping"}\n{"ty', b'pe":"ping"}\n')
    async with a_stream(sends(*pieces)) as stream:
        found = [await stream.next_event() for _ in range(3)]
        with pytest.raises(BlockLost, match="ended the stream early"):
            await stream.next_event()
    assert found == [Queued(), Ping(), Ping()]


async def test_the_start_arrives_whole_with_the_token() -> None:
    seen: list[tuple[str, BlockStart]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen.append((request.headers["x-sangam-token"], BlockStart.model_validate_json(body)))
        spoken = b'"protocol":%d' % PROTOCOL_VERSION
        assert spoken in body, "a default on the other side must not stand in for it"
        return web.Response()

    async with a_worker(handler) as url, worker_client() as client, await opened(client, url):
        pass
    assert seen == [(TOKEN, START)]


@pytest.mark.parametrize(
    "pieces",
    [
        (b'{"type":"queued"}',),  # without its end
        (b"nonsense\n",),
        (b'{"type":"unknown"}\n',),
        (),
    ],
)
async def test_a_stream_that_makes_no_sense_loses_the_block(pieces: tuple[bytes, ...]) -> None:
    async with a_stream(sends(*pieces)) as stream:
        with pytest.raises(BlockLost):
            await stream.next_event()


async def test_a_broken_connection_loses_the_block() -> None:
    async def break_off(request: web.Request) -> None:
        assert request.transport is not None
        request.transport.abort()

    handler = sends(b'{"type":"queued"}\n', then=break_off)
    async with a_stream(handler) as stream:
        await stream.next_event()
        with pytest.raises(BlockLost, match="broke off"):
            await stream.next_event()


async def hang(request: web.Request) -> None:
    await asyncio.Event().wait()


async def test_silence_loses_the_block() -> None:
    async with a_stream(sends(then=hang), silence_seconds=0.1) as stream:
        with pytest.raises(BlockLost, match="silent"):
            await stream.next_event()


async def test_a_worker_that_does_not_answer_loses_the_block() -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with a_worker(never) as url, worker_client(answer_seconds=0.1) as client:
        with pytest.raises(BlockLost, match="does not answer"):
            await client.open(url, START)


async def test_nobody_at_the_address_loses_the_block() -> None:
    async with a_worker(sends()) as url:
        pass
    async with worker_client() as client:
        with pytest.raises(BlockLost, match="does not answer"):
            await client.open(url, START)


async def test_an_aborted_stream_loses_the_block_with_the_reason() -> None:
    async with a_stream(sends(then=hang)) as stream:
        reading = asyncio.create_task(stream.next_event())
        await asyncio.sleep(0)
        stream.abort("the lease is gone")
        with pytest.raises(BlockLost, match="the lease is gone"):
            await reading
        with pytest.raises(BlockLost, match="the lease is gone"):
            await stream.next_event()


def answers(status: int, text: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text, content_type="application/json")

    return handler


async def test_a_refusal_is_a_value() -> None:
    body = '{"code": "no_pages", "message": "full"}'
    async with a_worker(answers(409, body)) as url, worker_client() as client:
        found = await client.open(url, START)
    assert found == Refusal(code="no_pages", message="full")


@pytest.mark.parametrize(
    ("status", "body"), [(409, "{}"), (409, "no"), (401, ""), (426, "{}"), (500, "oh"), (503, "")]
)
async def test_any_other_answer_loses_the_block(status: int, body: str) -> None:
    async with a_worker(answers(status, body)) as url, worker_client() as client:
        with pytest.raises(BlockLost):
            await client.open(url, START)


async def test_what_a_worker_calls_invalid_is_the_requests_fault() -> None:
    body = '{"code": "invalid_request", "message": "cache: unknown", "param": "cache"}'
    async with a_worker(answers(400, body)) as url, worker_client() as client:
        with pytest.raises(InvalidRequest, match="cache: unknown") as caught:
            await client.open(url, START)
    assert caught.value.param == "cache"


async def test_a_stream_that_was_read_to_its_end_leaves_its_connection_for_the_next() -> None:
    ports: set[object] = set()

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername"))
        return await sends(b'{"type":"queued"}\n')(request)

    async with a_worker(handler) as url, worker_client() as client:
        for _ in range(5):
            async with await opened(client, url) as stream:
                await stream.next_event()
                with pytest.raises(BlockLost):
                    await stream.next_event()
    assert len(ports) == 1
