"""The public port's application: ``/v1`` as OpenAI has it, and ``/healthz``. Nothing else.

Puts the pieces of this package together; the composition root gives it what they need.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from sangam_core.errors import InvalidRequest, SangamError
from sangam_router.driver import Driver
from sangam_router.metrics import RouterMetrics
from sangam_router.public_api.bodies import read_json
from sangam_router.public_api.errors import http_error
from sangam_router.public_api.gate import Gate
from sangam_router.public_api.responses import Delivery, PlainAnswer, StreamedAnswer
from sangam_router.public_api.schemas import (
    GenerationBody,
    StreamOptions,
    read_chat_body,
    read_completion_body,
    read_messages,
    read_prompts,
)
from sangam_router.public_api.shapes import Endpoint, Envelope
from sangam_router.public_api.wishes import Wishes
from sangam_router.settings import RouterSettings
from sangam_router.tokenizer import TextTokenizer

_ENDPOINTS = "POST /v1/chat/completions, POST /v1/completions and GET /v1/models"


@dataclass(frozen=True, slots=True)
class PublicParts:
    """What the public API stands on."""

    settings: RouterSettings
    tokenizer: TextTokenizer
    wishes: Wishes
    driver: Driver
    metrics: RouterMetrics


class PublicApi:
    """The endpoints."""

    def __init__(self, parts: PublicParts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        arrival_seconds = time.time()
        body = read_chat_body(await self._read(request))
        self._check_model(body.model)
        prompt = await self._parts.tokenizer.encode_chat(read_messages(body.messages))
        return self._answer(
            "chat", body, [prompt], body.max_completion_tokens, arrival_seconds, "messages"
        )

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        arrival_seconds = time.time()
        body = read_completion_body(await self._read(request))
        self._check_model(body.model)
        prompts = read_prompts(body.prompt)
        self._parts.wishes.check_fan_out(len(prompts), body.n or 1)
        ids = [
            await self._parts.tokenizer.encode(item) if isinstance(item, str) else item
            for item in prompts
        ]
        return self._answer(
            "completion", body, ids, body.max_completion_tokens, arrival_seconds, "prompt"
        )

    async def models(self) -> Response:
        """``GET /v1/models``."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """``GET /v1/models/{name}``."""
        self._check_model(name)
        return JSONResponse(self._model())

    async def healthz(self) -> Response:
        """Whether the process answers; readiness is on the internal port."""
        return JSONResponse({"status": "ok"})

    # -- internals --------------------------------------------------------------------------

    async def _read(self, request: Request) -> object:
        return await read_json(
            request,
            max_bytes=self._settings.max_body_bytes,
            seconds=self._settings.body_seconds,
        )

    def _check_model(self, name: str) -> None:
        served = self._settings.served_model_name
        if name != served:
            raise InvalidRequest(
                f"model {name!r} does not exist here; use {served!r}",
                param="model",
                code="model_not_found",
            )

    def _model(self) -> dict[str, object]:
        return {
            "id": self._settings.served_model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "sangam",
            "max_model_len": self._parts.wishes.max_sequence_tokens(),
        }

    def _answer(
        self,
        endpoint: Endpoint,
        body: GenerationBody,
        prompts: Sequence[Sequence[int]],
        max_completion_tokens: int | None,
        arrival_seconds: float,
        param: str,
    ) -> Response:
        parts, settings = self._parts, self._settings
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest(
                "stream_options is only allowed with stream: true",
                param="stream_options",
                code="invalid_value",
            )
        envelope = Envelope.new(endpoint, settings.served_model_name)
        jobs = parts.wishes.jobs(
            body,
            prompts,
            max_completion_tokens=max_completion_tokens,
            request_id=uuid.uuid4().hex,
            arrival_seconds=arrival_seconds,
            param=param,
        )
        structlog.contextvars.bind_contextvars(response_id=envelope.response_id)
        delivery = Delivery(
            driver=parts.driver,
            jobs=jobs,
            envelope=envelope,
            num_prompt_tokens=sum(map(len, prompts)),
            keep_alive_seconds=settings.keep_alive_seconds,
            # Longer than patience with the fleet lasts, so that its 503 can still be a status.
            hold_status_seconds=settings.no_worker_seconds + settings.keep_alive_seconds,
            send_seconds=settings.send_seconds,
            text_of_token=parts.tokenizer.text_of_token,
        )
        if body.stream:
            options = body.stream_options or StreamOptions()
            if body.include_timings:
                options = options.model_copy(update={"include_timings": True})
            return StreamedAnswer(delivery, options)
        return PlainAnswer(delivery, has_timings=bool(body.include_timings))


def public_app(parts: PublicParts) -> Gate:
    """The public ASGI application."""
    api = PublicApi(parts)
    app = FastAPI(
        title="Sangam", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", api.completions, methods=["POST"], response_model=None)
    for path, show in (
        ("/v1/models", api.models),
        ("/v1/models/{name:path}", api.model),
        ("/healthz", api.healthz),
    ):
        app.add_api_route(path, show, methods=["GET", "HEAD"], response_model=None)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(SangamError, _sangam_error)
    keys = [key.get_secret_value() for key in parts.settings.api_keys]
    return Gate(app, api_keys=keys, metrics=parts.metrics)


async def _http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        wrong = InvalidRequest(f"{asked} is not allowed; use {allowed}", code="method_not_allowed")
        response = http_error(wrong).response()
        response.headers["allow"] = allowed
        return response
    message = f"{asked} does not exist here; there are {_ENDPOINTS}"
    return http_error(InvalidRequest(message, code="not_found")).response()


async def _sangam_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SangamError)
    return http_error(error).response()
