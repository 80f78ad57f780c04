"""The gate before the public API: what its last catch says, and to whom."""

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
