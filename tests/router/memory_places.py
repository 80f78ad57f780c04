"""``Places`` in memory: the core's policies over plain counters, one strict line each.

Lets the driver be tested without Redis; the real one is tested against Redis.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from tests.router.stub_worker import StubWorker

from sangam_core.errors import Overloaded, Unavailable
from sangam_core.lifecycle import Request
from sangam_core.placement import (
    Demand,
    FleetLoad,
    PlacementPolicy,
    WorkerLoad,
    place_decode,
    place_prefill,
)
from sangam_router.fleet import FleetLimits
from sangam_router.places import Place


@dataclass
class _Held:
    """What one placement holds."""

    tokens: int
    pages: int


@dataclass
class _Seat:
    """A worker with its counters."""

    worker: StubWorker
    total_pages: int
    is_draining: bool = False
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    held: list[_Held] = field(default_factory=list)

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            worker_id=self.worker.worker_id,
            epoch=self.worker.epoch,
            role=self.worker.role,
            outstanding_prefill_tokens=sum(item.tokens for item in self.held),
            free_pages=self.total_pages - sum(item.pages for item in self.held),
            total_pages=self.total_pages,
            is_draining=self.is_draining,
            num_blocks=sum(item.pages > 0 for item in self.held),
        )


class MemoryPlaces:
    """Places on stub workers."""

    def __init__(
        self,
        *workers: StubWorker,
        policy: PlacementPolicy | None = None,
        total_pages: int = 100,
        max_waiting: int = 100,
        patience_seconds: float = 5.0,
    ) -> None:
        self.seats = {w.worker_id: _Seat(w, total_pages) for w in workers}
        self._lines: dict[bool, list[tuple[float, str]]] = {False: [], True: []}
        self._policy = policy or PlacementPolicy()
        self._max_waiting = max_waiting
        self._patience_seconds = patience_seconds
        self._changed = asyncio.Condition()

    async def prefill(
        self, request: Request, demand: Demand, avoid: Collection[str], *, is_new: bool
    ) -> Place:
        def choose(fleet: FleetLoad) -> WorkerLoad | None:
            return place_prefill(fleet, demand, self._policy)

        limit = self._max_waiting if is_new else None
        return await self._find(request, demand, False, choose, avoid, limit)

    async def decode(self, request: Request, demand: Demand, avoid: Collection[str]) -> Place:
        return await self._find(
            request, demand, True, lambda fleet: place_decode(fleet, demand), avoid, None
        )

    def lost(self, place: Place) -> asyncio.Event:
        return self.seats[place.worker_id].lost

    async def release_load(self, place: Place) -> None:
        place.reservation.tokens = 0
        await self.changed()

    async def release(self, place: Place) -> None:
        place.reservation.tokens = place.reservation.pages = 0
        await self.changed()

    # -- for tests ----------------------------------------------------------------------------

    async def changed(self) -> None:
        """Make everybody look again."""
        async with self._changed:
            self._changed.notify_all()

    @property
    def waiting(self) -> list[tuple[float, str]]:
        """Who stands in either line."""
        return self._lines[False] + self._lines[True]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition of the counters or the line."""
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(condition)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held and nobody waits."""
        held = [item for seat in self.seats.values() for item in seat.held]
        return not self.waiting and not any(item.tokens or item.pages for item in held)

    def limits(self) -> FleetLimits | None:
        """As ``FleetView.limits``."""
        pages = [seat.total_pages for seat in self.seats.values()]
        return FleetLimits(min(pages) * 16, 4096) if pages else None

    @property
    def has_colocated(self) -> bool:
        """As ``FleetView.has_colocated``."""
        return any(seat.worker.role.value == "colocated" for seat in self.seats.values())

    # -- internals ------------------------------------------------------------------------------

    async def _find(
        self,
        request: Request,
        demand: Demand,
        is_decode: bool,
        choose: Callable[[FleetLoad], WorkerLoad | None],
        avoid: Collection[str],
        limit: int | None,
    ) -> Place:
        me, line = request.order, self._lines[is_decode]
        tokens = 0 if is_decode else demand.cost_tokens
        try:
            async with asyncio.timeout(self._patience_seconds), self._changed:
                while True:
                    fleet = FleetLoad(tuple(seat.load() for seat in self.seats.values()))
                    others = tuple(w for w in fleet.workers if w.epoch not in avoid)
                    worker = choose(replace(fleet, workers=others)) or choose(fleet)
                    if worker is not None and not any(other < me for other in line):
                        return self._take(worker, tokens, demand.num_pages)
                    if me not in line:
                        if limit is not None and len(line) >= limit:
                            raise Overloaded("the line is full", retry_after_seconds=2)
                        line.append(me)
                        self._changed.notify_all()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable("no worker is ready", retry_after_seconds=3) from None
        finally:
            if me in line:
                line.remove(me)

    def _take(self, worker: WorkerLoad, tokens: int, pages: int) -> Place:
        seat = self.seats[worker.worker_id]
        held = _Held(tokens, pages)
        seat.held.append(held)
        return Place(worker.worker_id, worker.epoch, seat.worker.url, worker.role, held)
