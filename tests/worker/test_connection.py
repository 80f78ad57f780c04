"""Connections that keep a worker waiting, what must outlive their deadline, and what is no HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.core.http_wire import ASKED, PATIENCE_SECONDS, Wire, connected, told_and_closed
from tests.worker.fakes import ToyEngine
from tests.worker.harness import TOKEN, a_client, a_start, a_worker

HEAD_SECONDS = 0.2
LONG_SECONDS = 3 * HEAD_SECONDS
POSTED = f"POST /internal/v1/blocks HTTP/1.1\r\nHost: x\r\nX-Sangam-Token: {TOKEN}\r\n".encode()


@asynccontextmanager
async def wire(head_seconds: float = HEAD_SECONDS, **settings: Any) -> AsyncIterator[Wire]:
    """A connection to a worker that has no patience for heads."""
    async with (
        a_worker(head_deadline_seconds=head_seconds, **settings) as worker,
        connected(worker.url) as opened,
    ):
        yield opened


def told(answer: bytes, status: int) -> str:
    """Code and message of a worker's refusal, behind which the connection is closed."""
    body = told_and_closed(answer, status)
    assert set(body) == {"code", "message"}
    return f"{body['code']}: {body['message']}"


async def test_a_head_that_never_ends_is_408_however_steadily_it_comes() -> None:
    async with wire() as opened:
        opened.writer.write(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
        answer = await opened.trickle(b"x", every_seconds=HEAD_SECONDS / 8)
    assert told(answer, 408).startswith("request_timeout: the request's head did not arrive")


async def test_a_connection_on_which_nothing_comes_is_closed_without_a_word() -> None:
    async with wire() as opened:
        assert await opened.rest() == b""


async def test_a_kept_connection_may_rest_longer_than_a_head_may_take() -> None:
    """Routers and workers keep theirs, and a block sent on one must not be lost."""
    async with wire() as opened:
        opened.writer.write(ASKED + b"\r\n")
        first = await opened.answer()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(opened.reader.read(1), LONG_SECONDS)
        opened.writer.write(ASKED + b"\r\n")
        second = await opened.answer()
    assert first[:15] == second[:15] == b"HTTP/1.1 200 OK"


async def test_a_block_may_run_longer_than_a_head_may_take() -> None:
    engine = ToyEngine()
    engine.gate.clear()
    async with (
        a_worker(engine, head_deadline_seconds=HEAD_SECONDS) as worker,
        a_client() as client,
    ):
        run = await client.start(worker, a_start(worker))
        await asyncio.sleep(LONG_SECONDS)
        engine.gate.set()
        assert (await run.rest())[-1] == "completed"


async def test_a_body_has_its_own_deadline_and_not_the_heads() -> None:
    async with wire(body_deadline_seconds=PATIENCE_SECONDS) as opened:
        opened.writer.write(POSTED + b"Content-Length: 2\r\n\r\n{")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(opened.reader.read(1), LONG_SECONDS)
        opened.writer.write(b"}")
        assert b"Field required" in await opened.answer()


async def test_a_head_that_is_too_large_is_told_so() -> None:
    async with wire(PATIENCE_SECONDS) as opened:
        opened.writer.write(ASKED + b"Cookie: " + b"x" * 17_000)
        assert told(await opened.rest(), 431).startswith("head_too_large: ")


async def test_what_is_no_http_is_refused_in_the_workers_form() -> None:
    async with wire(PATIENCE_SECONDS) as opened:
        opened.writer.write(b"this is no HTTP\r\n\r\n")
        assert told(await opened.rest(), 400).startswith("malformed_request: ")


@pytest.mark.parametrize("token", [TOKEN, "wrong"])
async def test_a_body_that_breaks_its_framing_ends_the_connection_and_nothing_else(
    token: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a wrong token it is answered without its body being read."""
    head = POSTED.replace(TOKEN.encode(), token.encode()) + b"Transfer-Encoding: chunked\r\n\r\n"
    with capture_logs() as logs:
        async with a_worker() as worker:
            async with connected(worker.url) as opened:
                opened.writer.write(head + b"no length\r\n")
                assert told(await opened.rest(), 400).startswith("malformed_request: ")
            async with connected(worker.url) as opened:
                opened.writer.write(ASKED + b"\r\n")
                assert b"200 OK" in await opened.answer()
    assert [each for each in logs if each["log_level"] == "error"] == []
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == []
