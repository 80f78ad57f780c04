"""The one place where errors become HTTP: status, headers, and OpenAI's error body.

Used by the public API before the first byte (a status) and after it (an error event).
"""

import math
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from sangam_core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    SangamError,
    Unavailable,
)

_STATUS_OF_CODE = {
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "request_too_large": 413,
    "unsupported_encoding": 415,
    "head_too_large": 431,
    "invalid_api_key": 401,
}
"""Codes of ``InvalidRequest`` whose status is not 400."""

_UNREAD_BODY_CODES = frozenset({"request_timeout", "request_too_large", "bad_framing"})
"""What is left of such a body would be taken for the connection's next request."""

_MAX_MESSAGE_CHARACTERS = 1000
_MAX_PARAM_CHARACTERS = 100
"""Messages and params repeat what a client wrote: a field's name, say, of two megabytes."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as it goes out."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    def response(self) -> JSONResponse:
        """The error as an HTTP response."""
        return JSONResponse(self.body, self.status, self.headers)


def http_error(error: SangamError) -> HttpError:
    """Map an error of ours to HTTP."""
    headers: dict[str, str] = {}
    param = code = None
    match error:
        case InvalidRequest():
            param, code = error.param, error.code
            status = _STATUS_OF_CODE.get(code or "", 400)
            kind = "authentication_error" if status == 401 else "invalid_request_error"
            if code in _UNREAD_BODY_CODES:
                headers["connection"] = "close"
            if status == 401:
                headers["www-authenticate"] = "Bearer"
        case Overloaded():
            status, kind, code = 429, "rate_limit_error", "overloaded"
        case Unavailable():
            status, kind, code = 503, "service_unavailable_error", "unavailable"
        case DeadlineExceeded():
            status, kind, code = 504, "timeout_error", "deadline_exceeded"
        case _:
            status, kind, code = 500, "server_error", "internal_error"
    if isinstance(error, Overloaded | Unavailable):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds)))
    message = _shortened(str(error), _MAX_MESSAGE_CHARACTERS)
    param = None if param is None else _shortened(param, _MAX_PARAM_CHARACTERS)
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return HttpError(status, body, headers)


def _shortened(text: str, max_characters: int) -> str:
    """A text without its middle where it is too long: messages end with what to do."""
    if len(text) <= max_characters:
        return text
    kept = (max_characters - len(" ... ")) // 2
    return f"{text[:kept]} ... {text[-kept:]}"
