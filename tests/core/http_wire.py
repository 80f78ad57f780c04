"""A connection to one of our HTTP servers, byte by byte, for tests of what is no good HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

PATIENCE_SECONDS = 10.0
ASKED = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
"""A request's head but for the empty line that ends it."""


class Wire:
    """A connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def rest(self) -> bytes:
        """What comes until the server closes."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.reader.read()

    async def answer(self) -> bytes:
        """One answer: head and body."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = await self.reader.readuntil(b"\r\n\r\n")
            fields = dict(line.split(b": ", 1) for line in head.lower().splitlines()[1:] if line)
            return head + await self.reader.readexactly(int(fields[b"content-length"]))

    async def trickle(self, byte: bytes, *, every_seconds: float) -> bytes:
        """Send a byte now and then until the server closes; what came."""
        coming = asyncio.create_task(self.rest())
        while not coming.done():
            self.writer.write(byte)
            await asyncio.wait([coming], timeout=every_seconds)
        return await coming


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Wire]:
    """A connection to the server at a URL."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


def told_and_closed(answer: bytes, status: int) -> Any:
    """The body of a refusal behind which the connection is closed."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"connection: close" in head.lower()
    return json.loads(body)
