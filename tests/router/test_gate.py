"""The gate before the public API: what its last catch says, and to whom."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.testing import capture_logs

from sangam_core.errors import Unavailable
from sangam_router.metrics import RouterMetrics
from sangam_router.public_api.gate import Gate


async def fails_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    raise Unavailable("nobody is here")


async def fails_in_its_answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"half", "more_body": True})
    raise Unavailable("the other half is lost")


async def sent_by(app: ASGIApp) -> list[Message]:
    """What goes out for a request, through the gate."""
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("nothing of the request is read")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/healthz", "headers": []}
    await Gate(app, api_keys=(), metrics=RouterMetrics())(scope, receive, send)
    return sent


async def test_what_fails_before_its_answer_is_answered_with_its_error() -> None:
    start, body = await sent_by(fails_at_once)
    assert (start["type"], start["status"]) == ("http.response.start", 503)
    assert b"nobody is here" in body["body"]


async def test_what_fails_in_its_answer_gets_no_second_one() -> None:
    """Its end is left out: the server closes the connection, and nobody takes it for whole."""
    with capture_logs() as logs:
        sent = await sent_by(fails_in_its_answer)
    assert [each["type"] for each in sent] == ["http.response.start", "http.response.body"]
    assert sent[-1]["more_body"]
    assert [each["status"] for each in logs if each["event"] == "request"] == [200]


async def cancelled(scope: Scope, receive: Receive, send: Send) -> None:
    raise asyncio.CancelledError


async def cancelled_in_its_answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise asyncio.CancelledError


async def test_what_the_routers_end_cuts_off_before_its_answer_is_503() -> None:
    """uvicorn cancels what outlasts its shutdown, and logs a traceback for what lets that out."""
    start, body = await sent_by(cancelled)
    assert start["status"] == 503
    assert b"retry-after" in dict(start["headers"])
    assert b"this router stops" in body["body"]


async def test_what_the_routers_end_cuts_off_in_its_answer_gets_no_second_one() -> None:
    assert [message.get("status") for message in await sent_by(cancelled_in_its_answer)] == [200]
