"""Whether a child process of a local cluster does its work: over HTTP, or Redis's PING.

Each answers yes or no within a second and raises nothing.
"""

import asyncio
import contextlib

import aiohttp

_DEADLINE_SECONDS = 1.0


class HttpProbe:
    """True while a GET of ``url`` answers 200."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def __call__(self) -> bool:
        """Ask once."""
        timeout = aiohttp.ClientTimeout(total=_DEADLINE_SECONDS)
        try:
            async with self._session.get(self._url, timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


class RedisProbe:
    """True while a Redis without password at this port answers PING."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    async def __call__(self) -> bool:
        """Ask once."""
        try:
            async with asyncio.timeout(_DEADLINE_SECONDS):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    writer.write(b"PING\r\n")
                    return (await reader.readline()).startswith(b"+PONG")
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError):
            return False
