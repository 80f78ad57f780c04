"""Reading a body: up to its limit, and no byte more."""

import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from sangam_core.errors import InvalidRequest
from sangam_router.public_api.bodies import read_json


def a_request(*pieces: bytes, states_length: bool = False) -> Request:
    """A POST whose body arrives in pieces."""
    left = list(pieces)

    async def receive() -> Message:
        assert left, "a server waits here until the client goes away"
        body = left.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(left)}

    length = str(sum(map(len, pieces))).encode()
    headers = [(b"content-length", length)] if states_length else []
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


@pytest.mark.parametrize("states_length", [False, True])
async def test_a_body_of_exactly_the_limit_is_read(states_length: bool) -> None:
    body = json.dumps({"prompt": "x" * 50}).encode()
    request = a_request(body[:20], body[20:], states_length=states_length)
    read: Any = await read_json(request, max_bytes=len(body), seconds=5.0)
    assert read == {"prompt": "x" * 50}


@pytest.mark.parametrize(
    "text", [b"\xed\xa0\x80", rb"\ud800", b"\xff"], ids=["as bytes", "escaped", "no UTF-8"]
)
async def test_half_a_character_is_refused_however_it_is_written(text: bytes) -> None:
    """No tokenizer takes it, and no response could hold it."""
    with pytest.raises(InvalidRequest) as refused:
        await read_json(a_request(b'{"prompt": "' + text + b'"}'), max_bytes=99, seconds=5.0)
    assert refused.value.code == "invalid_json"


async def test_a_byte_order_mark_before_a_body_is_passed_over() -> None:
    read: Any = await read_json(a_request(b'\xef\xbb\xbf{"n": 1}'), max_bytes=99, seconds=5.0)
    assert read == {"n": 1}


@pytest.mark.parametrize("states_length", [False, True])
async def test_a_body_one_byte_beyond_the_limit_is_refused(states_length: bool) -> None:
    body = json.dumps({"prompt": "x" * 50}).encode()
    request = a_request(body[:20], body[20:], states_length=states_length)
    with pytest.raises(InvalidRequest) as refused:
        await read_json(request, max_bytes=len(body) - 1, seconds=5.0)
    assert refused.value.code == "request_too_large"
