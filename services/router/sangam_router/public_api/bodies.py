"""Reads a request's body under a size limit and a deadline, and parses it as JSON.

Neither uvicorn nor starlette bounds a body; a router that reads without bounds can be filled up
or held for ever by one client.
"""

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from sangam_core.errors import InvalidRequest

_SURROGATE = re.compile(rb"\\\\u[dD][89a-fA-F]")


async def read_json(request: Request, *, max_bytes: int, seconds: float) -> Any:
    """The parsed body.

    Raises:
        InvalidRequest: too large (413), too slow (408), or not JSON (400).
        ClientDisconnect: the client went away.
    """
    length = request.headers.get("content-length")
    if length is not None and length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise InvalidRequest(
            f"the body did not arrive within {seconds:g} s", code="request_timeout"
        ) from None
    return _parse(bytes(body))


def _parse(body: bytes) -> Any:
    try:
        parsed = json.loads(body, parse_constant=_refuse_constant)
        if _SURROGATE.search(body):  # half a character: no tokenizer or response can hold it
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(f"the body is larger than {max_bytes} bytes", code="request_too_large")
