"""Answers on their way to a client: as one JSON body, or as server-sent events.

Decides when the status goes out, what each event holds and how errors after the first byte look.
Who generates is ``answering``'s, how bodies look is ``shapes``'.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sangam_core.errors import SangamError
from sangam_router.driver import Driver
from sangam_router.job import Answer, Delta, Job
from sangam_router.public_api.answering import ClientGone, Update, answer_all
from sangam_router.public_api.errors import http_error
from sangam_router.public_api.schemas import StreamOptions
from sangam_router.public_api.shapes import Envelope, Usage, denoising_body, timings_body

_log = structlog.get_logger(__name__)

_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Delivery:
    """What both kinds of response need.

    Attributes:
        num_prompt_tokens: of all prompts, each counted once.
        keep_alive_seconds: a stream that is silent for this long gets a comment.
        hold_status_seconds: until then a stream's status waits for the first event, so that a
            refusal can still be one.
        send_seconds: a client that takes nothing for this long is given up.
    """

    driver: Driver
    jobs: Sequence[Job]
    envelope: Envelope
    num_prompt_tokens: int
    keep_alive_seconds: float
    hold_status_seconds: float
    send_seconds: float
    text_of_token: Callable[[int], str]

    def usage(self) -> Usage:
        """A count that starts now."""
        return Usage(self.num_prompt_tokens)


class PlainAnswer(Response):
    """All answers in one body, once the last is there."""

    def __init__(self, delivery: Delivery, *, has_timings: bool) -> None:
        self.background = None
        self._delivery = delivery
        self._has_timings = has_timings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate, then respond; a client that goes away cancels everything."""
        delivery = self._delivery
        texts: list[list[str]] = [[] for _ in delivery.jobs]
        answers: dict[int, Answer] = {}

        async def collect(updates: Sequence[Update], *, is_failing: bool) -> None:
            for update in updates:
                if isinstance(update.said, Answer):
                    answers[update.index] = update.said
                else:
                    texts[update.index].append(update.said.text)

        try:
            await answer_all(
                delivery.driver, delivery.jobs, receive, collect, delivery.keep_alive_seconds
            )
        except ClientGone:
            return
        except SangamError as error:
            await http_error(error).response()(scope, receive, send)
            return
        body = self._body(["".join(parts) for parts in texts], answers)
        await JSONResponse(body)(scope, receive, send)

    def _body(self, texts: Sequence[str], answers: dict[int, Answer]) -> dict[str, Any]:
        envelope, usage = self._delivery.envelope, self._delivery.usage()
        ordered = [answers[index] for index in range(len(answers))]
        usage.num_tokens_of_choice = {i: answer.num_tokens for i, answer in enumerate(ordered)}
        choices = [
            envelope.full_choice(index, text, answer.finish_reason)
            for index, (text, answer) in enumerate(zip(texts, ordered, strict=True))
        ]
        body = envelope.body(choices, is_chunk=False) | {"usage": usage.body()}
        if self._has_timings:
            body["sangam"] = timings_body(*(answer.timings for answer in ordered))
        return body


class StreamedAnswer(Response):
    """Answers as server-sent events, choices interleaved as they come."""

    def __init__(self, delivery: Delivery, options: StreamOptions) -> None:
        self.background = None
        self._delivery = delivery
        self._options = options
        self._usage = delivery.usage()
        self._has_started = False
        self._begun = time.monotonic()
        self._has_role: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send; a client that goes away cancels everything."""
        self._send_message = send

        async def deliver(updates: Sequence[Update], *, is_failing: bool) -> None:
            if is_failing and not self._has_started:
                return  # a status says more than an event does
            events = b"".join(self._events_of(update) for update in updates)
            if updates:
                await self._send(events)
            elif self._has_started or self._may_start():
                await self._send(_KEEP_ALIVE)

        delivery = self._delivery
        try:
            await answer_all(
                delivery.driver, delivery.jobs, receive, deliver, delivery.keep_alive_seconds
            )
            await self._finish()
        except ClientGone:
            return
        except SangamError as error:
            await self._fail(error, scope, receive, send)

    async def _finish(self) -> None:
        events = b""
        if self._options.include_usage:
            last = self._delivery.envelope.body([], is_chunk=True)
            events = _event(last | {"usage": self._usage.body()})
        await self._send(events + _DONE, is_last=True)

    async def _fail(self, error: SangamError, scope: Scope, receive: Receive, send: Send) -> None:
        failure = http_error(error)
        if not self._has_started:
            await failure.response()(scope, receive, send)
            return
        try:
            await self._send(_event(failure.body), is_last=True)
        except ClientGone:
            return

    def _may_start(self) -> bool:
        return time.monotonic() - self._begun >= self._delivery.hold_status_seconds

    # -- events -----------------------------------------------------------------------------

    def _events_of(self, update: Update) -> bytes:
        events = b""
        index, said, envelope = update.index, update.said, self._delivery.envelope
        self._usage.num_tokens_of_choice[index] = said.num_tokens
        if envelope.endpoint == "chat" and index not in self._has_role:
            self._has_role.add(index)
            events += self._chunk(envelope.role_choice(index))
        if isinstance(said, Answer):
            extra: dict[str, Any] = {}
            if self._options.include_timings:
                extra["sangam"] = timings_body(said.timings)
            return events + self._chunk(envelope.end_choice(index, said.finish_reason), extra)
        return events + self._delta(index, said)

    def _delta(self, index: int, delta: Delta) -> bytes:
        choice = self._delivery.envelope.text_choice(index, delta.text)
        if self._options.include_denoising:
            choice["denoising"] = denoising_body(delta.denoised, self._delivery.text_of_token)
        elif not delta.text:
            return b""
        return self._chunk(choice)

    def _chunk(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        body = self._delivery.envelope.body([choice], is_chunk=True)
        if self._options.continuous_usage_stats:
            body["usage"] = self._usage.body()
        elif self._options.include_usage:
            body["usage"] = None
        return _event(body | (extra or {}))

    # -- bytes ------------------------------------------------------------------------------

    async def _send(self, body: bytes, *, is_last: bool = False) -> None:
        """Send, the status first. ``ClientGone`` when the client takes nothing any more."""
        try:
            async with asyncio.timeout(self._delivery.send_seconds):
                if not self._has_started:
                    self._has_started = True
                    await self._send_message(_START)
                if body or is_last:
                    await self._send_message(
                        {"type": "http.response.body", "body": body, "more_body": not is_last}
                    )
        except TimeoutError:
            _log.info("client_stalled", response_id=self._delivery.envelope.response_id)
            raise ClientGone("the client takes nothing any more") from None
        except OSError:
            raise ClientGone("the client is gone") from None


_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        # nginx would otherwise hold events back until its buffer is full.
        (b"x-accel-buffering", b"no"),
    ],
}


def _event(body: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )
