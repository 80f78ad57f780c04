"""Follows the worker pods and writes what their annotations ask for; every router runs one.

Decides when to list, watch, write again and wait; what a wish is, is ``annotations``', whether it
is granted, the ledger's (``ledger.desires``). An API server or a Redis that is away changes nothing
for requests or roles: the watcher says so once and goes on trying.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import structlog

from sangam_core.errors import Unavailable
from sangam_router.fleet_watch.annotations import wish_of
from sangam_router.fleet_watch.pods import HistoryGone, PodEvent, PodSource, PodsUnavailable
from sangam_router.ledger.desires import Decision, Verdict, Wish
from sangam_router.ledger.tasks import raise_if_cancelled
from sangam_router.metrics import FleetWatchMetrics

_log = structlog.get_logger(__name__)

_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 10.0
"""An API server that returns should not find its roles minutes late."""


class WritesWishes(Protocol):
    """What the watcher needs of the ledger."""

    async def write(self, wish: Wish) -> Decision:
        """Write a wish. Raises ``Unavailable``."""
        ...


@dataclass(frozen=True, slots=True)
class WatchStatus:
    """How the watcher is, for operators.

    Attributes:
        is_enabled: whether this router follows pods at all.
        is_synced: whether it knows every pod and is being told of changes.
        last_event_seconds_ago: since something was heard of the API server.
        problem: what is wrong, None when nothing is.
    """

    is_enabled: bool = False
    is_synced: bool = False
    last_event_seconds_ago: float | None = None
    problem: str | None = None


class FleetWatcher:
    """Keeps workers' desired state in step with their pods' annotations.

    Args:
        resync_seconds: how often every wish is written again.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pods: PodSource,
        desires: WritesWishes,
        metrics: FleetWatchMetrics,
        *,
        resync_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pods = pods
        self._desires = desires
        self._metrics = metrics
        self._resync_seconds = resync_seconds
        self._clock = clock
        self._wishes: dict[str, Wish] = {}
        self._told: dict[str, tuple[str, str]] = {}
        self._heard_at: float | None = None
        self._is_synced = self._is_trouble_told = False
        self._pods_problem: str | None = "the pods have not been listed yet"
        self._ledger_problem: str | None = None

    @property
    def status(self) -> WatchStatus:
        """How it is now."""
        ago = None if self._heard_at is None else self._clock() - self._heard_at
        return WatchStatus(
            is_enabled=True,
            is_synced=self._is_synced,
            last_event_seconds_ago=ago,
            problem=self._pods_problem or self._ledger_problem,
        )

    async def run(self) -> None:
        """Follow the pods until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(), name="fleet watch")
            group.create_task(self._resync(), name="fleet resync")

    # -- the API server ---------------------------------------------------------------------

    async def _follow(self) -> None:
        backoff_seconds = _FIRST_BACKOFF_SECONDS
        version: str | None = None
        while True:
            began = self._clock()
            try:
                if version is None:
                    version = await self._list()
                version = await self._watch(version)
            except HistoryGone as error:
                if backoff_seconds > _FIRST_BACKOFF_SECONDS:
                    self._lost(f"the list's own version is gone: {error}")
                version = None
            except PodsUnavailable as error:
                self._lost(str(error))
                # Whatever happened meanwhile: deleted pods show only in a list.
                version = None
            except Exception as error:  # noqa: BLE001 - all routers see the same pods: a bug here
                # must not end every one of them.
                _log.exception("the fleet watcher has a bug")
                self._lost(f"bug: {type(error).__name__}: {error}")
                version = None
            raise_if_cancelled()
            if self._clock() - began >= _MAX_BACKOFF_SECONDS:
                backoff_seconds = _FIRST_BACKOFF_SECONDS
                if version is not None:
                    continue
            # Also after a clean end that came at once: a proxy that ends every watch must not be
            # asked a thousand times a second.
            await asyncio.sleep(backoff_seconds)
            backoff_seconds = min(2 * backoff_seconds, _MAX_BACKOFF_SECONDS)

    async def _list(self) -> str:
        listed = await self._pods.list()
        wishes = [wish for pod in listed.pods if (wish := wish_of(pod)) is not None]
        self._wishes = {wish.worker_id: wish for wish in wishes}
        self._told = {each: what for each, what in self._told.items() if each in self._wishes}
        self._heard()
        await self._write(wishes)
        return listed.version

    async def _watch(self, version: str) -> str:
        async with self._pods.watch(version) as events:
            self._found()
            async for event in events:
                self._heard()
                await self._take(event)
                version = event.version
        self._heard()
        return version

    async def _take(self, event: PodEvent) -> None:
        if event.kind == "BOOKMARK":
            return
        wish = None if event.kind == "DELETED" else wish_of(event.pod)
        if wish is None:
            self._forget(event.pod["metadata"]["uid"])
            return
        self._wishes[wish.worker_id] = wish
        await self._write([wish])

    def _forget(self, worker_id: str) -> None:
        """A pod is gone, or going, and never comes back under this id."""
        self._wishes.pop(worker_id, None)
        self._told.pop(worker_id, None)

    def _heard(self) -> None:
        self._heard_at = self._clock()

    def _found(self) -> None:
        if not self._is_synced:
            _log.info("pods are followed", num_workers=len(self._wishes))
        self._is_synced, self._is_trouble_told, self._pods_problem = True, False, None
        self._metrics.is_synced.set(1)

    def _lost(self, problem: str) -> None:
        if not self._is_trouble_told:
            _log.warning("pods cannot be followed; roles stay as they are", error=problem)
        self._is_synced, self._is_trouble_told, self._pods_problem = False, True, problem
        self._metrics.is_synced.set(0)

    # -- the ledger -------------------------------------------------------------------------

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self._resync_seconds)
            try:
                await self._write([*self._wishes.values()])
            except Exception as error:  # noqa: BLE001 - as above
                _log.exception("the fleet watcher has a bug")
                self._ledger_problem = f"bug: {type(error).__name__}: {error}"
            raise_if_cancelled()

    async def _write(self, wishes: Iterable[Wish]) -> None:
        """Write wishes; those that Redis cannot take now are written at the next resync."""
        for wish in wishes:
            try:
                decision = await self._desires.write(wish)
            except Unavailable as error:
                self._ledger_problem = str(error)
                return
            self._tell(wish, decision)
        self._ledger_problem = None

    def _tell(self, wish: Wish, decision: Decision) -> None:
        """Log and count a decision, once."""
        if wish.worker_id not in self._wishes:  # its pod has gone while it was written
            return
        news = {"pod": wish.name, "role": wish.role, "is_drained": wish.is_drained}
        if decision.verdict is Verdict.APPLIED:
            _log.info("desired state", **news)
        if decision.verdict is not Verdict.REFUSED:
            if decision.verdict is not Verdict.UNSURE:  # the next resync asks again
                self._told.pop(wish.worker_id, None)
            return
        what = (f"{wish.role}/{wish.is_drained}", decision.reason)
        if self._told.get(wish.worker_id) != what:
            self._told[wish.worker_id] = what
            self._metrics.refused.labels(reason=decision.reason).inc()
            _log.warning("desired state refused", **news, reason=decision.reason)
