"""The one place that turns the worker's errors into HTTP answers."""

import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from sangam_core.errors import InvalidRequest, SangamError, Unavailable
from sangam_core.wire import PROTOCOL_VERSION
from sangam_worker.drain import RoleConflict
from sangam_worker.service import BlockRefused

_STATUS_OF_CODE = {"request_timeout": 408, "head_too_large": 431}
"""Codes of ``InvalidRequest`` whose status is not 400."""

_FRAMEWORK_CODES = {400: "invalid_request", 404: "not_found", 405: "method_not_allowed"}


class WrongProtocol(SangamError):
    """The other side speaks another version of the internal API (426)."""

    def __init__(self, spoken: object) -> None:
        # Any JSON may stand there: megabytes of it, or nested as deeply as it could just be read.
        shown = reprlib.repr(spoken)
        super().__init__(f"protocol {shown} is not spoken here; use {PROTOCOL_VERSION}")


def invalid_request_of(error: ValidationError) -> InvalidRequest:
    """The first thing that is wrong with a body, by name."""
    return _invalid(error.errors(include_url=False)[0])


def error_form(error: InvalidRequest) -> tuple[int, dict[str, str]]:
    """Status and body of what is refused, also before there is a request to answer."""
    code = error.code or "invalid_request"
    return _STATUS_OF_CODE.get(code, 400), _body(code, str(error), error.param)


def install(app: FastAPI) -> None:
    """Map every error of ours to its status."""
    app.add_exception_handler(BlockRefused, _refused)
    app.add_exception_handler(InvalidRequest, _invalid_request)
    app.add_exception_handler(RequestValidationError, _validation_failed)
    app.add_exception_handler(HTTPException, _framework_s_own)
    app.add_exception_handler(WrongProtocol, _wrong_protocol)
    app.add_exception_handler(RoleConflict, _role_conflict)
    app.add_exception_handler(Unavailable, _unavailable)


def _invalid(problem: Mapping[str, Any]) -> InvalidRequest:
    param = ".".join(str(part) for part in problem["loc"] if part != "body")
    return InvalidRequest(f"{param or 'body'}: {problem['msg']}", param=param or None)


def _body(code: str, message: str, param: str | None) -> dict[str, str]:
    body = {"code": code, "message": message, "param": param}
    return {name: value for name, value in body.items() if value}


def _answer(status: int, code: str, message: str, param: str | None = None) -> JSONResponse:
    return JSONResponse(_body(code, message, param), status)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BlockRefused)
    return JSONResponse(error.refusal.model_dump(), 409)


async def _invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, InvalidRequest)
    status, body = error_form(error)
    return JSONResponse(body, status)


async def _validation_failed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _invalid_request(request, _invalid(error.errors()[0]))


async def _framework_s_own(request: Request, error: Exception) -> JSONResponse:
    """What FastAPI refuses by itself: no such route or method, a body that is not UTF-8."""
    assert isinstance(error, HTTPException)
    code = _FRAMEWORK_CODES.get(error.status_code, "refused")
    answer = _answer(error.status_code, code, error.detail)
    answer.headers.update(error.headers or {})
    return answer


async def _wrong_protocol(request: Request, error: Exception) -> JSONResponse:
    answer = _answer(426, "wrong_protocol", str(error), "protocol")
    answer.headers["upgrade"] = f"sangam/{PROTOCOL_VERSION}"
    return answer


async def _role_conflict(request: Request, error: Exception) -> JSONResponse:
    return _answer(409, "role_conflict", str(error), "role")


async def _unavailable(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Unavailable)
    answer = _answer(503, "unavailable", str(error))
    answer.headers["retry-after"] = f"{error.retry_after_seconds:.0f}"
    return answer
