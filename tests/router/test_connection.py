"""Connections that keep a router waiting, and what it says to what is no HTTP."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.core.http_wire import ASKED, PATIENCE_SECONDS, Wire, connected, told_and_closed
from tests.router.builders import served
from tests.router.memory_places import MemoryPlaces
from tests.router.stub_worker import StubWorker, say
from tests.router.test_api_requests import CHAT, chat

from sangam_core.wire import BlockStart

HEAD_SECONDS = 0.2


@asynccontextmanager
async def wire(model_folder: Path, head_seconds: float = HEAD_SECONDS) -> AsyncIterator[Wire]:
    """A connection to a router that has no patience for heads."""
    async with (
        served(model_folder, MemoryPlaces(), head_seconds=head_seconds) as router,
        connected(router.url) as opened,
    ):
        yield opened


def told(answer: bytes, status: int) -> str:
    """The message of an error in OpenAI's form, behind which the connection is closed."""
    error = told_and_closed(answer, status)["error"]
    assert error["type"] == "invalid_request_error"
    return str(error["message"])


async def test_a_head_that_never_ends_is_408_however_steadily_it_comes(model_folder: Path) -> None:
    async with wire(model_folder) as opened:
        opened.writer.write(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
        answer = await opened.trickle(b"x", every_seconds=HEAD_SECONDS / 8)
    assert "head did not arrive within 0.2 s" in told(answer, 408)


async def test_a_connection_on_which_nothing_comes_is_closed_without_a_word(
    model_folder: Path,
) -> None:
    async with wire(model_folder) as opened:
        assert await opened.rest() == b""


async def test_the_next_head_on_a_kept_connection_has_a_deadline_too(model_folder: Path) -> None:
    async with wire(model_folder) as opened:
        opened.writer.write(ASKED + b"\r\n")
        assert b"200" in await opened.answer()
        opened.writer.write(ASKED)
        assert "head did not arrive" in told(await opened.rest(), 408)


async def test_a_head_that_begins_while_another_request_is_answered_has_a_deadline(
    model_folder: Path,
) -> None:
    async with wire(model_folder) as opened:
        opened.writer.write(ASKED + b"\r\n" + ASKED)
        assert b"200" in await opened.answer()
        assert "head did not arrive" in told(await opened.rest(), 408)


async def test_a_kept_connection_may_rest_longer_than_a_head_may_take(model_folder: Path) -> None:
    async with wire(model_folder) as opened:
        opened.writer.write(ASKED + b"\r\n")
        first = await opened.answer()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(opened.reader.read(1), 3 * HEAD_SECONDS)
        opened.writer.write(ASKED + b"\r\n")
        second = await opened.answer()
    assert first[:15] == second[:15] == b"HTTP/1.1 200 OK"


async def test_a_connection_may_rest_behind_a_body_that_came_after_its_answer(
    model_folder: Path,
) -> None:
    async with wire(model_folder) as opened:
        opened.writer.write(b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbo")
        assert b"404" in await opened.answer()
        opened.writer.write(b"dy")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(opened.reader.read(1), 3 * HEAD_SECONDS)
        opened.writer.write(ASKED + b"\r\n")
        assert b"200" in await opened.answer()


async def test_a_head_in_pieces_is_let_in(model_folder: Path) -> None:
    async with wire(model_folder, head_seconds=PATIENCE_SECONDS) as opened:
        for piece in (ASKED[:7], ASKED[7:20], ASKED[20:], b"\r\n"):
            opened.writer.write(piece)
            await opened.writer.drain()
            await asyncio.sleep(0)
        assert b"200 OK" in await opened.answer()


async def test_a_body_that_goes_on_behind_the_answer_ends_the_connection(
    model_folder: Path,
) -> None:
    """uvicorn stops counting a kept connection's rest with every byte."""
    async with wire(model_folder) as opened:
        opened.writer.write(ASKED + b"Content-Length: 100000\r\n\r\n")
        assert b"200" in await opened.answer()
        assert await opened.trickle(b"x", every_seconds=HEAD_SECONDS / 8) == b""


async def test_an_answer_may_take_longer_than_a_head(model_folder: Path) -> None:
    async def dawdle(start: BlockStart, step: int) -> None:
        await asyncio.sleep(3 * HEAD_SECONDS)

    body = json.dumps(chat(max_tokens=8)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with StubWorker(answer=say("hi"), before_pass=dawdle) as worker:
        places = MemoryPlaces(worker)
        async with (
            served(model_folder, places, head_seconds=HEAD_SECONDS) as router,
            connected(router.url) as opened,
        ):
            began = time.monotonic()
            opened.writer.write(head + body)
            answer = await opened.answer()
    assert b"200 OK" in answer
    assert time.monotonic() - began > HEAD_SECONDS


async def test_what_is_no_http_is_refused_in_the_apis_form(model_folder: Path) -> None:
    async with wire(model_folder, head_seconds=PATIENCE_SECONDS) as opened:
        opened.writer.write(b"this is no HTTP\r\n\r\n")
        assert "no valid HTTP request" in told(await opened.rest(), 400)


@pytest.mark.parametrize("is_second", [False, True])
async def test_a_head_that_is_too_large_is_told_so(model_folder: Path, is_second: bool) -> None:
    async with wire(model_folder, head_seconds=PATIENCE_SECONDS) as opened:
        if is_second:
            opened.writer.write(ASKED + b"\r\n")
            assert b"200" in await opened.answer()
        opened.writer.write(ASKED + b"Cookie: " + b"x" * 17_000)
        assert "head is larger than 16384 bytes" in told(await opened.rest(), 431)


async def test_a_body_that_breaks_its_framing_ends_the_connection_and_nothing_else(
    model_folder: Path,
) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    async with served(model_folder, MemoryPlaces()) as router:
        async with connected(router.url) as opened:
            opened.writer.write(head + b"no length\r\n")
            assert "no valid HTTP request" in told(await opened.rest(), 400)
        async with connected(router.url) as opened:
            opened.writer.write(ASKED + b"\r\n")
            assert b"200 OK" in await opened.answer()


async def test_an_application_that_would_answer_a_broken_request_fails_at_nothing(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has been called when the body turns out to be broken, and answers without reading it."""
    head = f"PUT {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with capture_logs() as logs:
        async with wire(model_folder, head_seconds=PATIENCE_SECONDS) as opened:
            opened.writer.write(head + b"no length\r\n")
            assert "no valid HTTP request" in told(await opened.rest(), 400)
    assert [each for each in logs if each["log_level"] == "error"] == []
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == []
