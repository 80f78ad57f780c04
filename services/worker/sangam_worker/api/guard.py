"""What stands before every request: the shared token, and bounds on bodies.

A plain ASGI middleware, since it must neither buffer a stream nor hide a disconnect. uvicorn
leaves two holes that are closed here: a request with both Content-Length and Transfer-Encoding
(two readers could disagree on where it ends), and a body that never ends.
"""

import asyncio
import hmac
import json
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sangam_core.wire import TOKEN_HEADER

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
"""Probes and scrapes carry no token, and say nothing that needs one."""


@dataclass(frozen=True)
class _Refused:
    """A request that never reaches the application."""

    status: int
    code: str
    message: str


class Guard:
    """ASGI middleware.

    Args:
        token: what ``x-sangam-token`` must hold.
        max_body_bytes: larger bodies get 413.
        body_deadline_seconds: slower bodies get 408.
    """

    def __init__(
        self, app: ASGIApp, *, token: str, max_body_bytes: int, body_deadline_seconds: float
    ) -> None:
        self._app = app
        self._token = token.encode()
        self._max_body_bytes = max_body_bytes
        self._body_deadline_seconds = body_deadline_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a bad request, pass on a good one."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refused = self._check(scope["path"], headers)
        if refused is not None:
            await _answer(send, refused)
            return
        try:
            async with asyncio.timeout(self._body_deadline_seconds):
                body = await self._read_body(receive)
        except TimeoutError:
            seconds = f"{self._body_deadline_seconds:g} s"
            refused = _Refused(408, "slow_body", f"the body took longer than {seconds}")
            await _answer(send, refused)
            return
        except asyncio.CancelledError:  # by the server, which stops: no error of ours to log
            await _answer(send, _Refused(503, "unavailable", "this worker stops"))
            return
        if isinstance(body, _Refused):
            await _answer(send, body)
        elif body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> _Refused | None:
        if b"content-length" in headers and b"transfer-encoding" in headers:
            return _Refused(
                400, "bad_framing", "Content-Length and Transfer-Encoding exclude each other"
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return self._too_large()
        if path not in OPEN_PATHS and not hmac.compare_digest(
            headers.get(TOKEN_HEADER.encode(), b""), self._token
        ):
            return _Refused(401, "unauthorized", f"{TOKEN_HEADER}: missing or wrong")
        return None

    async def _read_body(self, receive: Receive) -> "bytes | _Refused | None":
        """The whole body; ``None`` when the client went away in the midst of it."""
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > self._max_body_bytes:
                return self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> _Refused:
        return _Refused(
            413, "body_too_large", f"the body is larger than {self._max_body_bytes} bytes"
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """``receive`` that gives the body, read already, and then what comes after it."""
    is_given = False

    async def replaying_receive() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replaying_receive


async def _answer(send: Send, refused: _Refused) -> None:
    body = json.dumps({"code": refused.code, "message": refused.message}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
