"""How the router speaks to workers: start a block, follow its events, drop it.

Turns HTTP failures into ``BlockLost`` and a 409 into a ``Refusal``; decides nothing about what to
do then (``driver``). ``WorkerClient`` is a seam: tests have other ones.
"""

import asyncio
import json
from collections import deque
from types import TracebackType
from typing import Protocol, Self

import aiohttp
from pydantic import ValidationError

from sangam_core.errors import BlockLost, InvalidRequest
from sangam_core.wire import BLOCK_EVENT, TOKEN_HEADER, BlockEvent, BlockStart, Refusal

BLOCKS_PATH = "/internal/v1/blocks"

_LINE_BYTES = 4 * 1024 * 1024
"""Longest event line: a pass over a whole mask buffer of Dream without cache, with room."""


class BlockStream(Protocol):
    """The events of one block on one worker. Leaving the ``async with`` drops the block there."""

    async def next_event(self) -> BlockEvent:
        """The next event. ``BlockLost`` when the stream breaks, ends, or falls silent."""
        ...

    def abort(self, reason: str) -> None:
        """Make the current or next ``next_event`` raise ``BlockLost``."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class WorkerClient(Protocol):
    """Starts blocks on workers."""

    async def open(self, url: str, start: BlockStart) -> BlockStream | Refusal:
        """Start a block at the worker whose internal API is at ``url``.

        Raises:
            BlockLost: the worker cannot be reached, or answers anything but 200 or 409.
            InvalidRequest: the worker says that the block can never run (400).
        """
        ...


class HttpWorkerClient:
    """The real client: one connection pool for all workers.

    Args:
        token: secret shared with the workers.
        connect_seconds: time to connect.
        answer_seconds: time to get the answer's head; a worker that has to reserve pages answers
            between two iterations.
        silence_seconds: longest pause between lines.
    """

    def __init__(
        self, *, token: str, connect_seconds: float, answer_seconds: float, silence_seconds: float
    ) -> None:
        self._connect_seconds = connect_seconds
        self._answer_seconds = answer_seconds
        self._silence_seconds = silence_seconds
        self._headers = {"content-type": "application/json", TOKEN_HEADER: token}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # Kept shorter than workers keep idle connections: a start must not be lost on one
            # that the worker is just closing.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_seconds),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def open(self, url: str, start: BlockStart) -> BlockStream | Refusal:
        """See ``WorkerClient.open``."""
        assert self._session is not None, "enter the client first"
        body = start.model_dump_json().encode()
        try:
            async with asyncio.timeout(self._answer_seconds):
                response = await self._session.post(url + BLOCKS_PATH, data=body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BlockLost(
                f"worker at {url} does not answer: {str(error) or 'timed out'}"
            ) from None
        if response.status == 200:
            return HttpBlockStream(response, url, self._silence_seconds)
        return await self._not_started(response, url)

    async def _not_started(self, response: aiohttp.ClientResponse, url: str) -> Refusal:
        try:
            async with asyncio.timeout(self._answer_seconds), response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BlockLost(f"worker at {url} broke off: {str(error) or 'timed out'}") from None
        if response.status == 409:
            try:
                return Refusal.model_validate_json(text)
            except ValidationError:
                raise BlockLost(f"worker at {url} refused in a way we do not know") from None
        if response.status == 400:
            raise _invalid_request(text)
        raise BlockLost(f"worker at {url} answered {response.status}: {text[:200]}")


class HttpBlockStream:
    """Events of one block, one JSON object a line."""

    def __init__(self, response: aiohttp.ClientResponse, url: str, silence_seconds: float) -> None:
        self._response = response
        self._url = url
        self._silence_seconds = silence_seconds
        self._aborted: str | None = None
        self._lines: deque[bytes] = deque()
        self._rest = b""

    async def next_event(self) -> BlockEvent:
        """See ``BlockStream.next_event``."""
        while not self._lines:
            await self._read()
        if self._aborted:
            raise BlockLost(self._aborted)
        try:
            return BLOCK_EVENT.validate_json(self._lines.popleft())
        except ValidationError as error:
            raise BlockLost(f"worker at {self._url} sent what we do not know: {error}") from None

    async def _read(self) -> None:
        """Take in what has arrived: often several lines at once."""
        if self._aborted:
            raise BlockLost(self._aborted)
        try:
            async with asyncio.timeout(self._silence_seconds):
                chunk = await self._response.content.readany()
        except TimeoutError:
            raise BlockLost(
                f"worker at {self._url} was silent for {self._silence_seconds:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise BlockLost(self._aborted or f"worker at {self._url} broke off: {error}") from None
        if not chunk:
            raise BlockLost(f"worker at {self._url} ended the stream early")
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._lines.extend(lines)
        if len(self._rest) > _LINE_BYTES:
            raise BlockLost(f"worker at {self._url} sent a line without an end")

    def abort(self, reason: str) -> None:
        """See ``BlockStream.abort``."""
        self._aborted = reason
        self._response.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A connection that has been read to its end goes back to the pool; any other is closed,
        # which tells the worker to drop the block.
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


def _invalid_request(text: str) -> InvalidRequest:
    """A worker's 400 in its own words."""
    try:
        body = json.loads(text)
        return InvalidRequest(str(body["message"]), param=body.get("param"), code=body.get("code"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return InvalidRequest(f"the worker refuses the request: {text[:500]}")
