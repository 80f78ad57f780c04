"""Limits and holes of the public port: keys, body size and time, framing, a full line."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from starlette.types import Message
from tests.router.builders import MODEL, served
from tests.router.memory_places import MemoryPlaces
from tests.router.stub_worker import StubWorker, say
from tests.router.test_api_answers import asked, messages
from tests.router.test_api_requests import CHAT, chat

from sangam_core.wire import BlockStart


async def raw_answer(url: str, request: bytes) -> tuple[str, bool]:
    """Send bytes, read until the server closes; returns what came and whether it closed."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 5)
        return answer.decode(), True
    except TimeoutError:
        return "", False
    finally:
        writer.close()
        await writer.wait_closed()


async def test_keys_open_the_door_and_nothing_else_does(model_folder: Path) -> None:
    async with StubWorker(answer=say("hi")) as worker:
        places = MemoryPlaces(worker)
        async with served(model_folder, places, api_keys="one, two") as router:
            async with router.client(api_key="two") as client:
                answer = await client.chat.completions.create(model=MODEL, messages=messages())
                assert answer.choices[0].message.content == "hi"
            async with router.client(api_key="three") as client:
                with pytest.raises(openai.AuthenticationError) as caught:
                    await client.models.list()
            async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
                missing = await client.get("/v1/models")
                health = await client.get("/healthz")
    assert caught.value.code == "invalid_api_key"
    assert missing.status_code == 401
    assert missing.headers["www-authenticate"] == "Bearer"
    assert health.status_code == 200


async def test_a_key_may_hold_any_characters(model_folder: Path) -> None:
    async with (
        served(model_folder, MemoryPlaces(), api_keys="clé") as router,
        httpx.AsyncClient(base_url=router.url, timeout=30) as client,
    ):
        bearer = {b"Authorization": "Bearer clé".encode()}
        assert (await client.get("/v1/models", headers=bearer)).status_code == 200


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_beyond_the_limit_is_refused(model_folder: Path, is_chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    async with (
        served(model_folder, MemoryPlaces(), max_body_bytes=2000) as router,
        httpx.AsyncClient(base_url=router.url, timeout=30) as client,
    ):
        content = pieces() if is_chunked else b"x" * 100_000
        response = await client.post(CHAT, content=content)
    assert response.status_code == 413
    assert response.headers["connection"] == "close"
    assert response.json()["error"]["code"] == "request_too_large"


async def test_a_body_that_never_ends_is_given_up(model_folder: Path) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    async with served(model_folder, MemoryPlaces(), body_seconds=0.1) as router:
        answer, is_closed = await raw_answer(router.url, head)
    assert answer.startswith("HTTP/1.1 408")
    assert is_closed


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
    ],
)
async def test_a_body_framed_twice_is_refused_and_its_connection_closed(
    model_folder: Path, framing: bytes
) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n0\r\n\r\n"
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    async with served(model_folder, MemoryPlaces()) as router:
        answer, is_closed = await raw_answer(router.url, head + smuggled)
    assert answer.startswith("HTTP/1.1 400")
    assert answer.count("HTTP/1.1") == 1
    assert is_closed


async def test_a_full_line_is_429_with_retry_after(model_folder: Path) -> None:
    go_on = asyncio.Event()

    async def hold(start: BlockStart, step: int) -> None:
        await go_on.wait()

    async with StubWorker(answer=say("hi"), before_pass=hold) as worker:
        places = MemoryPlaces(worker, total_pages=10, max_waiting=1)
        async with (
            served(model_folder, places) as router,
            httpx.AsyncClient(base_url=router.url, timeout=20) as client,
        ):
            first = asyncio.create_task(client.post(CHAT, json=chat(max_tokens=64)))
            await places.until(lambda: not places.is_empty)
            second = asyncio.create_task(client.post(CHAT, json=chat(max_tokens=64)))
            await places.until(lambda: bool(places.waiting))
            third = await client.post(CHAT, json=chat(max_tokens=64))
            go_on.set()
            assert (await first).status_code == (await second).status_code == 200
    assert third.status_code == 429
    assert third.headers["retry-after"] == "2"
    assert third.json()["error"]["type"] == "rate_limit_error"


async def test_no_worker_is_503_with_retry_after(model_folder: Path) -> None:
    async with (
        served(model_folder, MemoryPlaces(patience_seconds=0.05)) as router,
        httpx.AsyncClient(base_url=router.url, timeout=30) as client,
    ):
        response = await client.post(CHAT, json=chat())
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"


async def test_a_deadline_before_the_first_byte_is_504(model_folder: Path) -> None:
    async def hang(start: BlockStart, step: int) -> None:
        await asyncio.Event().wait()

    worker = StubWorker(before_pass=hang)
    async with asked(model_folder, worker, request_seconds=0.2) as (client, _):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model=MODEL, messages=messages(), stream=True)
    assert caught.value.status_code == 504


async def test_a_client_that_takes_nothing_is_given_up(model_folder: Path) -> None:
    """Otherwise its answer and its connection would be held for ever."""
    body = json.dumps(chat(stream=True)).encode()
    messages_in: list[Message] = [{"type": "http.request", "body": body}]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}

    async def receive() -> Message:
        if messages_in:
            return messages_in.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async with StubWorker(answer=say("hi" * 60)) as worker:
        places = MemoryPlaces(worker)
        async with served(model_folder, places, send_seconds=0.1) as router:
            await asyncio.wait_for(router.app(scope, receive, send), 10)
        assert places.is_empty
