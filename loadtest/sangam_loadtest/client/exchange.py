"""One request over HTTP: what came back, or how it failed.

Decides the kinds of failure and what of the event stream is looked at: most chunks are only
counted past, since thousands of streams share one core. Called by ``open_loop``.
"""

import asyncio
import errno
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sangam_core.errors import SangamError
from sangam_loadtest.client.bodies import Body

_WORTH_PARSING = re.compile(rb'"(?:usage|sangam|error)":\s*\{')
"""Quotes within a JSON text are escaped, so no answer can forge these."""
_MAX_EVENT_BYTES = 8 << 20
_MAX_MESSAGE_CHARACTERS = 300


class ExchangeFailed(SangamError):
    """A request failed; ``kind`` is one of few words, for counting."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Reply:
    """What a stream told.

    Attributes:
        first_text_at: the loop's time of the first text, None where there was none.
        text: the answer, where it was asked for.
        usage: OpenAI's ``usage``. timings: ``sangam.timings``. Empty where not sent.
    """

    first_text_at: float | None = None
    text: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False


async def exchange(
    session: aiohttp.ClientSession, url: str, body: Body, *, wants_text: bool
) -> Reply:
    """Send a request and read its stream to the end. The caller sets the deadline.

    Raises:
        ExchangeFailed: for whatever went wrong on the wire or at the server.
    """
    reply = Reply()
    now = asyncio.get_running_loop().time
    try:
        async with session.post(url + body.path, data=body.content) as response:
            if response.status != 200:
                raise _refused(response.status, await response.content.read(4096))
            if response.content_type != "text/event-stream":
                raise ExchangeFailed("bad_answer", f"not a stream: {response.content_type}")
            events = EventReader()
            async for chunk in response.content.iter_any():
                for data in events.feed(chunk):
                    _take(reply, data, now, wants_text)
    except aiohttp.ClientPayloadError as error:
        raise ExchangeFailed("broken_stream", str(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise _disconnected(error) from error
    if not reply.is_complete:
        raise ExchangeFailed("broken_stream", "the stream ended without [DONE]")
    return reply


class EventReader:
    """Cuts a byte stream into the data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that has become complete; comments are left out."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise ExchangeFailed("bad_answer", "an event without an end")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def _take(reply: Reply, data: bytes, now: Callable[[], float], wants_text: bool) -> None:
    if data == b"[DONE]":
        reply.is_complete = True
        return
    is_worth = wants_text or reply.first_text_at is None or _WORTH_PARSING.search(data)
    if not is_worth:
        return
    try:
        event = json.loads(data)
        text = _text(event)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ExchangeFailed("bad_answer", f"not a completion's chunk: {data[:80]!r}") from error
    if isinstance(event.get("error"), dict):
        kind = str(event["error"].get("type") or "unknown")
        raise ExchangeFailed(f"event_{kind}", _cut(str(event["error"].get("message", ""))))
    if text:
        if reply.first_text_at is None:
            reply.first_text_at = now()
        if wants_text:
            reply.text.append(text)
    if isinstance(event.get("usage"), dict):
        reply.usage = event["usage"]
    if isinstance(event.get("sangam"), dict):
        reply.timings = event["sangam"].get("timings") or {}


def _text(event: dict[str, Any]) -> str:
    choices = event.get("choices") or []
    if not choices:
        return ""
    choice = choices[0]
    return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")


def _refused(status: int, content: bytes) -> ExchangeFailed:
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = content.decode("utf-8", "replace")
    return ExchangeFailed(f"http_{status}", _cut(message))


def _disconnected(error: aiohttp.ClientError | OSError) -> ExchangeFailed:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
        return ExchangeFailed("too_many_open_files", "raise `ulimit -n` of the load test")
    if isinstance(cause, OSError) and cause.errno == errno.EADDRNOTAVAIL:
        return ExchangeFailed("no_free_port", "this host has no outgoing port left")
    if isinstance(error, aiohttp.ClientConnectorError):
        return ExchangeFailed("connect", _cut(str(error)))
    return ExchangeFailed("connection", _cut(str(error) or type(error).__name__))


def _cut(message: str) -> str:
    return message[:_MAX_MESSAGE_CHARACTERS]
