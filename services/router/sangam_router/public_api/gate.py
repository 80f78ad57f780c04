"""What every request of the public port passes first: request id, framing, API key, the last catch.

A plain ASGI middleware: starlette's own kind would put itself between a response and the news
that the client is gone.
"""

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Sequence

import structlog
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sangam_core.errors import InvalidRequest, SangamError, Unavailable
from sangam_router.metrics import RouterMetrics
from sangam_router.public_api.errors import http_error

_log = structlog.get_logger(__name__)

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_KNOWN_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/healthz")


class Gate:
    """Lets requests in.

    Args:
        api_keys: accepted bearer tokens; none means that ``/v1`` is open.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], metrics: RouterMetrics) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in api_keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # A list of its own: the message's may be one that every answer shares.
                own = (REQUEST_ID_HEADER.encode(), request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                self._check(scope, headers)
                await self._app(scope, receive, send_with_id)
            except ClientDisconnect:
                status = 499  # whatever the application tried to say to nobody
            except asyncio.CancelledError:  # by the server, which stops: no error of ours to log
                if not status:
                    stops = Unavailable("this router stops before it could answer; ask again")
                    await http_error(stops).response()(scope, receive, send_with_id)
            except Exception as error:  # noqa: BLE001 - the request boundary
                if not isinstance(error, SangamError):
                    _log.exception("request_failed")
                    error = SangamError("internal error")
                if not status:
                    await http_error(error).response()(scope, receive, send_with_id)
            finally:
                self._metrics.http_responses.labels(_label(scope["path"]), status or 499).inc()
                log = _log.debug if scope["path"] == "/healthz" else _log.info
                log(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status or 499,
                    seconds=round(time.monotonic() - started, 4),
                )

    def _check(self, scope: Scope, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:
            raise InvalidRequest(
                "Content-Length and Transfer-Encoding exclude each other", code="bad_framing"
            )
        if self._api_keys and scope["path"].startswith("/v1"):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip().encode("latin-1")  # the bytes as they came
            is_known = any(hmac.compare_digest(given, known) for known in self._api_keys)
            if scheme.lower() != "bearer" or not is_known:
                raise InvalidRequest(
                    "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                )


def _label(path: str) -> str:
    """A path as a metric's label: a bounded set, whatever clients ask for."""
    return next((known for known in _KNOWN_PATHS if path.startswith(known)), "other")
