"""A stream whose answer fails right behind its last text: nothing that has settled is kept back."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
from starlette.types import Message
from tests.router.builders import job

from sangam_core.errors import Unavailable
from sangam_router.driver import Driver
from sangam_router.job import Answer, Delta, Emit, Job, Timings
from sangam_router.public_api.responses import Delivery, StreamedAnswer
from sangam_router.public_api.schemas import StreamOptions
from sangam_router.public_api.shapes import Envelope

Script = Callable[[Emit, asyncio.Event], Awaitable[Answer]]


class ScriptedDriver:
    """A driver whose answers are told by scripts, one a job."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = iter(scripts)
        self.is_begun = asyncio.Event()

    async def run(self, job: Job, emit: Emit) -> Answer:
        return await next(self._scripts)(emit, self.is_begun)


def said(text: str) -> Delta:
    return Delta(text=text, num_tokens=len(text), denoised=())


async def streamed(driver: ScriptedDriver, num_jobs: int = 1) -> tuple[int, str]:
    """Status and body of a completion stream; the driver is told once its first text is out."""
    delivery = Delivery(
        driver=cast("Driver", driver),
        jobs=[job() for _ in range(num_jobs)],
        envelope=Envelope.new("completion", "m"),
        num_prompt_tokens=2,
        keep_alive_seconds=5.0,
        hold_status_seconds=5.0,
        send_seconds=5.0,
        text_of_token=str,
    )
    status, body = 0, b""

    async def send(message: Message) -> None:
        nonlocal status, body
        status = message.get("status", status)
        body += message.get("body", b"")
        if b"first" in body:
            driver.is_begun.set()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with asyncio.timeout(5):
        await StreamedAnswer(delivery, StreamOptions())({"type": "http"}, receive, send)
    return status, body.decode()


async def test_text_that_settled_just_before_a_failure_comes_before_its_event() -> None:
    async def fails(emit: Emit, is_begun: asyncio.Event) -> Answer:
        emit(said("first"))
        await is_begun.wait()
        emit(said("second"))
        raise Unavailable("gave up")

    status, body = await streamed(ScriptedDriver(fails))
    assert status == 200
    assert 0 < body.find("first") < body.find("second") < body.find("gave up")


async def test_another_choice_that_ended_just_before_a_failure_has_its_finish_reason() -> None:
    async def fails(emit: Emit, is_begun: asyncio.Event) -> Answer:
        emit(said("first"))
        await is_begun.wait()
        raise Unavailable("gave up")

    async def ends(emit: Emit, is_begun: asyncio.Event) -> Answer:
        await is_begun.wait()
        return Answer("length", 5, Timings())

    _, body = await streamed(ScriptedDriver(ends, fails), num_jobs=2)
    assert 0 < body.find('"finish_reason":"length"') < body.find("gave up")


@pytest.mark.parametrize("text", ["", "first"])
async def test_a_failure_before_the_first_byte_is_a_status_whatever_has_settled(text: str) -> None:
    async def fails(emit: Emit, is_begun: asyncio.Event) -> Answer:
        if text:
            emit(said(text))
        raise Unavailable("gave up")

    status, body = await streamed(ScriptedDriver(fails))
    assert status == 503
    assert "first" not in body
