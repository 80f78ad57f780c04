"""Runs the answers of one HTTP request side by side and merges what they say.

Owns their tasks: all are awaited before it returns, and all are cancelled when one fails or the
client goes away. How updates look on the wire is the caller's business.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
from starlette.types import Receive

from sangam_core.errors import SangamError, Unavailable
from sangam_router.driver import Driver
from sangam_router.job import Answer, Delta, Job

_log = structlog.get_logger(__name__)


class ClientGone(SangamError):
    """The client closed its connection; nobody is left to tell."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one answer has to say: more of it, or how it ended. ``index`` is the choice's."""

    index: int
    said: Delta | Answer


class Sink(Protocol):
    """Where an HTTP request's updates go."""

    async def __call__(self, updates: Sequence[Update], *, is_failing: bool) -> None:
        """Take the updates at hand, in order.

        Args:
            updates: none when nothing came for a while.
            is_failing: they are the last ones; an error comes next.
        """
        ...


async def answer_all(
    driver: Driver, jobs: Sequence[Job], receive: Receive, sink: Sink, idle_seconds: float
) -> None:
    """Run all jobs to their end.

    Args:
        receive: the ASGI channel; its next message is the client's going away.
        idle_seconds: the sink is called with nothing after this long without updates.

    Raises:
        ClientGone: everything was cancelled.
        SangamError: what the first answer to fail failed with; the others were cancelled.
        Unavailable: the server cancelled this, which it does to what outlasts its shutdown.
    """
    outbox: asyncio.Queue[Update | SangamError] = asyncio.Queue()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_answer(driver, job, index, outbox))
                for index, job in enumerate(jobs)
            ]
            tasks.append(group.create_task(_watch_client(receive, outbox)))
            failure = await _deliver(outbox, sink, len(jobs), idle_seconds)
            for task in tasks:
                task.cancel()
    except asyncio.CancelledError:
        raise Unavailable("this router stops before the answer is complete; ask again") from None
    if failure is not None:
        raise failure


async def _answer(
    driver: Driver, job: Job, index: int, outbox: asyncio.Queue[Update | SangamError]
) -> None:
    def emit(delta: Delta) -> None:
        outbox.put_nowait(Update(index, delta))

    try:
        outbox.put_nowait(Update(index, await driver.run(job, emit)))
    except SangamError as error:
        outbox.put_nowait(error)
    except Exception:  # noqa: BLE001 - the request boundary
        _log.exception("answer_failed", answer_id=job.request_id)
        outbox.put_nowait(SangamError("internal error"))


async def _watch_client(receive: Receive, outbox: asyncio.Queue[Update | SangamError]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    outbox.put_nowait(ClientGone("the client is gone"))


async def _deliver(
    outbox: asyncio.Queue[Update | SangamError], sink: Sink, num_left: int, idle_seconds: float
) -> SangamError | None:
    """Hand updates to the sink, those at hand together, until all answers are there."""
    while num_left:
        items = await _at_hand(outbox, idle_seconds)
        updates = [item for item in items if isinstance(item, Update)]
        failure = next((item for item in items if isinstance(item, SangamError)), None)
        if isinstance(failure, ClientGone):
            return failure
        num_left -= sum(isinstance(update.said, Answer) for update in updates)
        try:
            if updates or failure is None:
                await sink(updates, is_failing=failure is not None)
        except ClientGone as gone:
            return gone
        if failure is not None:
            return failure
    return None


async def _at_hand(
    outbox: asyncio.Queue[Update | SangamError], idle_seconds: float
) -> list[Update | SangamError]:
    try:
        async with asyncio.timeout(idle_seconds):
            items = [await outbox.get()]
    except TimeoutError:
        return []
    while not outbox.empty():
        items.append(outbox.get_nowait())
    return items
