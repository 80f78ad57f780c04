"""The worker's socket and server: what accepted connections inherit, and who reads their bytes."""

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send

from sangam_worker.api.guard import Guard
from sangam_worker.server import HttpServer, bind

PATIENCE_SECONDS = 5


async def test_an_answers_next_write_does_not_wait_for_an_acknowledgement() -> None:
    """Otherwise each block on a kept connection loses 40 ms to the router's delayed ACK."""
    accepted: asyncio.Queue[int] = asyncio.Queue()

    def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        accepted.put_nowait(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listening = bind("127.0.0.1", [0])
    async with await asyncio.start_server(look, sock=listening):
        _, writer = await asyncio.open_connection(*listening.getsockname())
        assert await asyncio.wait_for(accepted.get(), PATIENCE_SECONDS)
        writer.close()
        await writer.wait_closed()


class _AnotherParser(asyncio.Protocol):
    """What uvicorn takes where httptools is installed, if it is left to choose."""

    def __init__(self, **_: object) -> None: ...

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def _never_reached(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError(scope["path"])


async def test_framing_is_read_by_h11_whatever_else_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guard refuses two lengths only if they come to it, as h11 hands them on."""
    monkeypatch.setattr("uvicorn.protocols.http.auto.AutoHTTPProtocol", _AnotherParser)
    listening = bind("127.0.0.1", [0])
    guard = Guard(_never_reached, token="", max_body_bytes=100, body_deadline_seconds=5.0)
    server = HttpServer(guard, listening, head_seconds=PATIENCE_SECONDS)
    await server.start()
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(
        b"POST /internal/v1/blocks HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    answer = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"bad_framing" in answer
    writer.close()
    await server.stop()
