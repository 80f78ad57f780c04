"""Servers that answer the scripts in ways that no healthy one does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.router.ledger.world import World

from sangam_core.errors import Unavailable
from sangam_router.ledger.connect import connect


async def _words(reader: asyncio.StreamReader) -> list[bytes]:
    """One command of Redis's protocol."""
    words = []
    for _ in range(int((await reader.readline())[1:])):
        size = int((await reader.readline())[1:])
        words.append((await reader.readexactly(size + 2))[:-2])
    return words


@asynccontextmanager
async def forgetful_server() -> AsyncIterator[str]:
    """Takes scripts, and knows none of them; as two servers behind one address do."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                name = (await _words(reader))[0].upper()
                if name == b"EVALSHA":
                    writer.write(b"-NOSCRIPT No matching script. Please use EVAL.\r\n")
                else:
                    writer.write(b"+PONG\r\n" if name == b"PING" else b"+OK\r\n")
        except (asyncio.IncompleteReadError, ValueError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0?protocol=2"


async def test_a_server_that_forgets_scripts_at_once_is_one_that_cannot_be_used_now() -> None:
    """While a fail-over is under way one connection may lead to the old server, one to the new."""
    async with forgetful_server() as url:
        redis = connect(url, timeout_seconds=5.0)
        try:
            router = World(redis, "forgetful").router()
            with pytest.raises(Unavailable):
                await router.heartbeat()
            await router.aclose()
        finally:
            await redis.aclose()
