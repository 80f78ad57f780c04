"""Sends a schedule of requests, each when it is due, whatever has become of those before it.

Decides nothing about the load (``load``) nor about what it means (``summary``).
A request's clock starts when it is *due*, not when it is sent, so that a slow server or client
cannot hide a wait (coordinated omission). Called by ``run``.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sangam_loadtest.client.bodies import Bodies, Body
from sangam_loadtest.client.exchange import ExchangeFailed, Reply, exchange
from sangam_loadtest.client.health import ClientHealth, HealthWatch
from sangam_loadtest.load import Due
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.traces.questions import is_answer_right

INTERRUPTED = "interrupted"
"""The kind of a request that the user's Ctrl-C ended: neither an answer nor a failure."""
_IDLE_CONNECTION_SECONDS = 1.0
"""Shorter than any server keeps an idle connection, so that none is reused as it is closed."""
_LEAD_SECONDS = 0.1
_SENDS_WITHOUT_YIELD = 16
_TIMINGS = (
    "queueing_seconds",
    "prefill_queueing_seconds",
    "decode_queueing_seconds",
    "prefill_seconds",
    "decode_seconds",
    "transfer_seconds",
    "num_blocks",
    "num_steps",
    "num_retries",
)


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, over the URLs in turn. URLs end before ``/v1``.

    Attributes:
        timeout_seconds: from due to the last byte; then the request has failed.
    """

    urls: tuple[str, ...]
    api_key: str | None = None
    timeout_seconds: float = 600.0

    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        found = {"content-type": "application/json"}
        if self.api_key is not None:
            found["authorization"] = f"Bearer {self.api_key}"
        return found


@dataclass(slots=True)
class Progress:
    """Counters that a display may look at while a run goes on."""

    num_requests: int = 0
    num_done: int = 0
    num_failed: int = 0
    watch: HealthWatch = field(default_factory=HealthWatch)


async def send_all(
    schedule: Sequence[Due],
    target: Target,
    bodies: Bodies,
    on_record: Callable[[RequestRecord], None],
    stop: asyncio.Event,
    progress: Progress,
) -> ClientHealth:
    """Send every request when it is due and wait for all ends, or until ``stop`` is set.

    ``on_record`` gets each request's record as it ends, the interrupted ones' too.
    """
    progress.num_requests = len(schedule)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=target.timeout_seconds)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_SECONDS)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=target.headers()
    ) as session:
        sender = _Sender(session, target, bodies, on_record, progress)
        sending = asyncio.create_task(sender.send(schedule))
        stopping = asyncio.create_task(stop.wait())
        watching = asyncio.create_task(progress.watch.watch())
        try:
            await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, stopping, watching):
                task.cancel()
            for task in (stopping, watching):
                with suppress(asyncio.CancelledError):
                    await task
            with suppress(asyncio.CancelledError):
                await sending
        return progress.watch.health()


class _Sender:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        bodies: Bodies,
        on_record: Callable[[RequestRecord], None],
        progress: Progress,
    ) -> None:
        self._session = session
        self._target = target
        self._bodies = bodies
        self._on_record = on_record
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time() + _LEAD_SECONDS

    async def send(self, schedule: Sequence[Due]) -> None:
        """Start each request when it is due. Its body is made before, while there is time."""
        async with asyncio.TaskGroup() as group:
            for due in schedule:
                body = self._bodies.of(due.index, due.request)
                wait = self._start + due.at_seconds - self._loop.time()
                if wait > 0 or due.index % _SENDS_WITHOUT_YIELD == 0:
                    await asyncio.sleep(max(0.0, wait))
                group.create_task(self._one(due, body))

    async def _one(self, due: Due, body: Body) -> None:
        due_at = self._start + due.at_seconds
        sent_at = self._loop.time()
        progress = self._progress
        progress.watch.sent(sent_at - due_at)
        urls = self._target.urls
        wants_text = due.request.right_answer is not None
        reply: Reply | None = None
        kind = message = None
        try:
            async with asyncio.timeout_at(due_at + self._target.timeout_seconds):
                url = urls[due.index % len(urls)]
                reply = await exchange(self._session, url, body, wants_text=wants_text)
        except TimeoutError:
            kind, message = "timeout", f"no end after {self._target.timeout_seconds:g} s"
        except ExchangeFailed as failure:
            kind, message = failure.kind, str(failure)
        except asyncio.CancelledError:
            kind = INTERRUPTED
            raise
        finally:
            progress.watch.ended()
            progress.num_done += 1
            progress.num_failed += kind is not None and kind != INTERRUPTED
            if reply is not None or kind is not None:
                ended_at = self._loop.time()
                times = (due_at, sent_at, ended_at)
                self._on_record(self._record(due, times, reply, kind, message))

    def _record(
        self,
        due: Due,
        times: tuple[float, float, float],
        reply: Reply | None,
        kind: str | None,
        message: str | None,
    ) -> RequestRecord:
        due_at, sent_at, ended_at = times
        told = reply or Reply()
        usage, timings, request = told.usage, told.timings, due.request
        measured: dict[str, Any] = {name: timings.get(name) for name in _TIMINGS}
        return RequestRecord(
            index=due.index,
            scheduled_seconds=due.at_seconds,
            sent_seconds=sent_at - self._start,
            prompt_tokens=int(usage.get("prompt_tokens") or request.prompt_tokens),
            output_tokens=int(usage.get("completion_tokens") or 0) if reply else 0,
            is_warmup=due.is_warmup,
            error=kind,
            error_message=message,
            latency_seconds=ended_at - due_at if reply else None,
            first_token_seconds=told.first_text_at - due_at if told.first_text_at else None,
            server_latency_seconds=timings.get("latency_seconds"),
            placements=timings.get("placements") or [],
            commit_counts=timings.get("commit_counts") or [],
            task=request.task,
            is_right=is_answer_right(request, "".join(told.text)) if reply else None,
            **measured,
        )
