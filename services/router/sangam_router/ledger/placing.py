"""Gets a block its place: snapshot, policy, reservation, and the waiting line in between.

Decides when to look again and when waiting is futile. Where a block goes is decided by
``sangam_core.placement``, whether it still can by the scripts. The driver calls ``Placer``.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum

from sangam_core.errors import Unavailable
from sangam_core.lease import WorkerLease
from sangam_core.placement import (
    Demand,
    FleetLoad,
    PlacementPolicy,
    WorkerLoad,
    place_decode,
    prefillers,
)
from sangam_core.placements import place
from sangam_core.wire import BlockKey
from sangam_router.fleet import FleetView
from sangam_router.ledger.ledger import Ledger
from sangam_router.ledger.records import Line, Refused, Reservation, Ticket
from sangam_router.ledger.tasks import raise_if_cancelled
from sangam_router.ledger.waiting import Waiter

_NUM_STALE_LOOKS = 3
"""Looks in a row that a changing fleet may spoil before the request waits for a wake-up."""
_FIRST_BACKOFF_SECONDS = 0.05
_LONGEST_BACKOFF_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 5.0
"""How long a request that nobody calls waits before it considers whether waiting is futile."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A place: what is reserved, and the worker as it was when it was chosen."""

    reservation: Reservation
    worker: WorkerLoad
    lease: WorkerLease


class _Outlook(Enum):
    """Why a look found no place."""

    STALE = "the snapshot was overtaken: look again"
    FULL = "no room now, or an older request waits"
    FUTILE = "no worker of now could take it, were it idle"


@dataclass(frozen=True, slots=True)
class _Search:
    """What one request is looking for."""

    line: Line
    ticket: Ticket
    demand: Demand
    avoid: Collection[str]
    choose: Callable[[FleetLoad], WorkerLoad | None]
    reserve: Callable[[FleetLoad, WorkerLoad], Awaitable[Reservation | Refused]]
    join: Callable[[], Awaitable[Waiter]]


class Placer:
    """Finds places for blocks, in order of arrival.

    A request that no worker of now could take even if idle (it is too long for each, its pages
    exceed every pool, or it needs a colocated worker) steps out of the line while others could be
    served, so that it holds up nobody; it enters again, at its old place, when the fleet changes.

    Args:
        patience_seconds: how long a request waits while no worker could take it or Redis does
            not answer. A full fleet is waited for without a limit; the caller has the deadline
            and cancels.
    """

    def __init__(
        self,
        ledger: Ledger,
        fleet: FleetView,
        policy: PlacementPolicy,
        *,
        patience_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._policy = policy
        self._patience_seconds = patience_seconds
        self._clock = clock

    async def prefill(
        self,
        ticket: Ticket,
        key: BlockKey,
        demand: Demand,
        *,
        avoid: Collection[str] = (),
        line_limit: int | None = None,
        patience_seconds: float | None = None,
    ) -> Placement:
        """A place for a block's prefill. A caller that is cancelled holds nothing afterwards.

        Args:
            avoid: epochs of workers that are taken only where no other has room.
            line_limit: as in ``Ledger.join_line``.
            patience_seconds: instead of the usual one.

        Raises:
            Overloaded: it would have to wait, and the line is full.
            Unavailable: no worker could take it, or Redis was away, for longer than the patience.
        """

        async def reserve(fleet: FleetLoad, worker: WorkerLoad) -> Reservation | Refused:
            bound = load_bound(fleet, demand, self._policy)
            return await self._ledger.reserve_prefill(
                ticket, key, demand, worker, bound_tokens=bound
            )

        search = _Search(
            Line.PREFILL,
            ticket,
            demand,
            avoid,
            lambda fleet: place(fleet, demand, self._policy),
            reserve,
            lambda: self._ledger.join_line(ticket, limit=line_limit),
        )
        return await self._place(search, patience_seconds)

    async def decode(
        self,
        ticket: Ticket,
        key: BlockKey,
        demand: Demand,
        *,
        avoid: Collection[str] = (),
        patience_seconds: float | None = None,
    ) -> Placement:
        """A place for the decode of a prefilled block; as ``prefill``.

        Raises:
            Unavailable: as ``prefill``.
        """
        search = _Search(
            Line.DECODE,
            ticket,
            demand,
            avoid,
            lambda fleet: place_decode(fleet, demand),
            lambda _, worker: self._ledger.reserve_decode(ticket, key, demand, worker),
            lambda: self._ledger.join_decode_line(ticket, demand.num_pages),
        )
        return await self._place(search, patience_seconds)

    # -- internals ------------------------------------------------------------------------

    async def _place(self, search: _Search, patience_seconds: float | None) -> Placement:
        patience = _Patience(
            self._patience_seconds if patience_seconds is None else patience_seconds, self._clock
        )
        waiter: Waiter | None = None
        num_stale = 0
        try:
            while True:
                found = await self._look_patiently(search, patience)
                if isinstance(found, Placement):
                    return found
                if found is _Outlook.STALE and num_stale < _NUM_STALE_LOOKS:
                    num_stale += 1
                    continue
                num_stale = 0
                if found is _Outlook.FUTILE and self._others_are_served(search.line):
                    await self._step_aside(search, patience)
                    waiter = None
                    continue
                waiter = waiter or await self._join(search, patience)
                if waiter is not None:
                    await self._wait(waiter, search, patience)
        finally:
            await self._ledger.leave_line(search.ticket, search.line)

    @staticmethod
    async def _join(search: _Search, patience: "_Patience") -> Waiter | None:
        """Stand in line; ``None`` while Redis is away, which the next look bears with."""
        try:
            return await search.join()
        except Unavailable as error:
            raise_if_cancelled()
            patience.strain(str(error))
            return None

    async def _look_patiently(self, search: _Search, patience: "_Patience") -> Placement | _Outlook:
        """Look once; while Redis is away, again and again."""
        backoff_seconds = _FIRST_BACKOFF_SECONDS
        while True:
            try:
                found = await self._look(search)
            except Unavailable as error:
                raise_if_cancelled()
                patience.strain(str(error))
                await asyncio.sleep(min(backoff_seconds, patience.left_seconds))
                backoff_seconds = min(2 * backoff_seconds, _LONGEST_BACKOFF_SECONDS)
                continue
            if found is _Outlook.FUTILE:
                patience.strain(self._fleet.problem() or _no_room(search))
            else:
                patience.restore()
            return found

    async def _look(self, search: _Search) -> Placement | _Outlook:
        snapshot = await self._ledger.snapshot()
        fleet = snapshot.fleet
        others = _without(fleet, search.avoid)
        worker = search.choose(others)
        if worker is None and others is not fleet:
            others, worker = fleet, search.choose(fleet)
        if worker is None:
            return _Outlook.FULL if search.choose(_idle(fleet)) else _Outlook.FUTILE
        got = await search.reserve(others, worker)
        if isinstance(got, Reservation):
            return Placement(got, worker, snapshot.leases[worker.worker_id])
        return _Outlook.FULL if got.must_wait else _Outlook.STALE

    async def _wait(self, waiter: Waiter, search: _Search, patience: "_Patience") -> None:
        """Wait in line until called; whoever is not called considers the fleet now and then."""
        while not await waiter.wait(min(_LONGEST_WAIT_SECONDS, patience.left_seconds)):
            snapshot = self._fleet.snapshot
            if snapshot is None or search.choose(_idle(snapshot.fleet)) is None:
                patience.strain(self._fleet.problem() or _no_room(search))
            else:
                patience.restore()

    async def _step_aside(self, search: _Search, patience: "_Patience") -> None:
        await self._ledger.leave_line(search.ticket, search.line)
        await self._fleet.wait_for_change(min(_LONGEST_WAIT_SECONDS, patience.left_seconds))

    def _others_are_served(self, line: Line) -> bool:
        """Whether the line moves at all, so that standing in it holds others up."""
        fleet = self._fleet.snapshot.fleet if self._fleet.snapshot else FleetLoad(())
        return any(
            worker.role.can_prefill if line is Line.PREFILL else worker.role.can_decode
            for worker in fleet.workers
            if not worker.is_draining
        )


class _Patience:
    """How long a request has seen no hope. A moment of hope restores all of it."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._since: float | None = None

    @property
    def left_seconds(self) -> float:
        """Until it is used up; a little at least, so that a wait is one."""
        if self._since is None:
            return max(0.01, self._seconds)
        return max(0.01, self._since + self._seconds - self._clock())

    def strain(self, problem: str) -> None:
        """No hope now.

        Raises:
            Unavailable: for too long by now.
        """
        now = self._clock()
        if self._since is None:
            self._since = now
        if now - self._since >= self._seconds:
            raise Unavailable(f"{problem}; waited {self._seconds:g} seconds")

    def restore(self) -> None:
        """There is hope."""
        self._since = None


def load_bound(fleet: FleetLoad, demand: Demand, policy: PlacementPolicy) -> float:
    """The o_w (tokens) that a worker which was chosen must still be under when reserved.

    theta, where Algorithm 2 chose it for being under that; infinity where it did not look.
    """
    dedicated, colocated = prefillers(fleet, demand, policy)
    return policy.theta_tokens if dedicated and colocated else math.inf


def _no_room(search: _Search) -> str:
    """Why nobody takes it, although the fleet is ready."""
    demand, what = search.demand, "decode" if search.line is Line.DECODE else "prefill"
    return (
        f"no worker that is ready could {what} the request, whose {demand.cost_tokens} tokens need "
        + ("a colocated worker" if demand.needs_colocated else f"{demand.num_pages} KV pages")
    )


def _without(fleet: FleetLoad, epochs: Collection[str]) -> FleetLoad:
    if not epochs:
        return fleet
    workers = tuple(worker for worker in fleet.workers if worker.epoch not in epochs)
    return replace(fleet, workers=workers)


def _idle(fleet: FleetLoad) -> FleetLoad:
    """The same workers with nothing on them."""
    return FleetLoad(
        tuple(
            replace(
                worker, outstanding_prefill_tokens=0, free_pages=worker.total_pages, num_blocks=0
            )
            for worker in fleet.workers
        )
    )
