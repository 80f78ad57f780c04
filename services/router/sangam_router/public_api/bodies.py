"""Reads a request's body under a size limit and a deadline, and parses it as JSON.

Neither uvicorn nor starlette bounds a body; a router that reads without bounds can be filled up
or held for ever by one client.
"""

import asyncio
import contextlib
import json
import re
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from sangam_core.errors import InvalidRequest

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_DISCARD_SECONDS = 1.0
_DISCARD_BYTES = 2**23
"""How long, and how much of, a body that is too large is still read."""


async def read_json(request: Request, *, max_bytes: int, seconds: float) -> Any:
    """The parsed body.

    Raises:
        InvalidRequest: too large (413), too slow (408), compressed (415), or not JSON (400).
        ClientDisconnect: the client went away.
    """
    body = bytearray()
    is_too_large, has_more = _stated_length(request) > max_bytes, True
    try:
        async with asyncio.timeout(seconds):
            while has_more and not is_too_large:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                is_too_large = len(body) > max_bytes
                has_more = message.get("more_body", False)
    except TimeoutError:
        raise InvalidRequest(
            f"the body did not arrive within {seconds:g} s", code="request_timeout"
        ) from None
    if is_too_large:
        if has_more:  # else the wait would be for the client to go away
            await _discard_a_while(request)
        raise InvalidRequest(f"the body is larger than {max_bytes} bytes", code="request_too_large")
    _check_encoding(request)  # not before: an answer in the middle of a body may never be read
    return _parse(bytes(body))


def _check_encoding(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidRequest(
            f"Content-Encoding {encoding[:20]!r} is not supported; send the body as it is",
            code="unsupported_encoding",
        )


def _parse(body: bytes) -> Any:
    if not body.strip():
        raise InvalidRequest("the body is empty; send a JSON object", code="invalid_json")
    try:
        # Left to itself, json would let half a character pass that stands there as bytes.
        parsed = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
        if _SURROGATE.search(body):  # one that is escaped: no tokenizer or response can hold it
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _stated_length(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


async def _discard_a_while(request: Request) -> None:
    """Let a client finish sending: one whose connection closes meanwhile never reads why."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while num_bytes < _DISCARD_BYTES:
                message = await request.receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
