"""The ledger under virtual time: loads, pages, and the two lines of those who wait.

Holds what Redis holds for real routers, and asks the same pure policies. Only the head of a line
is ever placed, in order of request arrival; it looks again whenever load or pages have come free.
Called by ``driver``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from sangam_core.placement import Demand, FleetLoad, WorkerLoad, place_decode
from sangam_core.placements import place
from sangam_loadtest.simulator.system import System

Placed = Callable[[int], None]
"""Told the number of the worker that a place was reserved on."""


@dataclass(order=True, slots=True)
class _Waiting:
    order: tuple[float, str]
    demand: Demand = field(compare=False)
    placed: Placed = field(compare=False)


class Fleet:
    """Reservations on every worker, and who waits for one."""

    def __init__(self, system: System) -> None:
        self._policy = system.placement_policy
        self._loads = [
            WorkerLoad(
                worker_id=f"worker-{number}",
                epoch="0",
                role=role,
                outstanding_prefill_tokens=0,
                free_pages=system.total_pages,
                total_pages=system.total_pages,
            )
            for number, role in enumerate(system.split.roles())
        ]
        self._number_of = {load.worker_id: n for n, load in enumerate(self._loads)}
        self._prefills: list[_Waiting] = []
        self._decodes: list[_Waiting] = []
        self._pending_decode_pages = 0

    @property
    def loads(self) -> tuple[WorkerLoad, ...]:
        """Every worker, by number."""
        return tuple(self._loads)

    @property
    def num_waiting(self) -> tuple[int, int]:
        """Who waits for a prefill's place, and who for a decode's."""
        return len(self._prefills), len(self._decodes)

    def ask_prefill(self, order: tuple[float, str], demand: Demand, placed: Placed) -> None:
        """Reserve load and pages for a prefill, now or when it is this request's turn."""
        waiting = _Waiting(order, demand, placed)
        heappush(self._prefills, waiting)
        # Behind another head, which has found no place as the fleet is now, none is to be had.
        if self._prefills[0] is waiting:
            self._serve_prefills()

    def ask_decode(self, order: tuple[float, str], demand: Demand, placed: Placed) -> None:
        """Reserve pages for a prefilled block's decode."""
        waiting = _Waiting(order, demand, placed)
        self._pending_decode_pages += demand.num_pages
        heappush(self._decodes, waiting)
        if self._decodes[0] is waiting:
            self._serve_decodes()

    def release(self, worker: int, *, tokens: int = 0, pages: int = 0) -> None:
        """Take load, or all pages of a block, off a worker: an iteration has run, it has left."""
        self._change(worker, tokens=-tokens, pages=-pages, blocks=-1 if pages else 0)
        if pages and self._loads[worker].role.can_decode:
            self._serve_decodes()
        self._serve_prefills()

    def _serve_decodes(self) -> None:
        """Give the heads of the line their places, as long as there are any.

        Those who wait hold no place, so handing one out never calls back in here before the line
        is consistent: ``placed`` only schedules events.
        """
        num_waiting = len(self._decodes)
        while self._decodes:
            waiting = self._decodes[0]
            found = place_decode(self._snapshot(), waiting.demand)
            if found is None:
                break
            heappop(self._decodes)
            self._pending_decode_pages -= waiting.demand.num_pages
            self._reserve(waiting, found, tokens=0)
        if len(self._decodes) < num_waiting:
            self._serve_prefills()  # fewer pages are kept free for decodes

    def _serve_prefills(self) -> None:
        """The same for prefills, after the decodes."""
        while self._prefills:
            waiting = self._prefills[0]
            found = place(self._snapshot(), waiting.demand, self._policy)
            if found is None:
                break
            heappop(self._prefills)
            self._reserve(waiting, found, tokens=waiting.demand.cost_tokens)

    def _snapshot(self) -> FleetLoad:
        return FleetLoad(tuple(self._loads), self._pending_decode_pages)

    def _reserve(self, waiting: _Waiting, found: WorkerLoad, *, tokens: int) -> None:
        number = self._number_of[found.worker_id]
        pages = waiting.demand.num_pages
        self._change(number, tokens=tokens, pages=pages, blocks=1 if pages else 0)
        waiting.placed(number)

    def _change(self, number: int, *, tokens: int, pages: int, blocks: int) -> None:
        load = self._loads[number]
        changed = replace(
            load,
            outstanding_prefill_tokens=load.outstanding_prefill_tokens + tokens,
            free_pages=load.free_pages - pages,
            num_blocks=load.num_blocks + blocks,
        )
        assert changed.outstanding_prefill_tokens >= 0, f"{load.worker_id}: load below 0"
        assert changed.num_blocks >= 0, f"{load.worker_id}: blocks below 0"
        assert 0 <= changed.free_pages <= changed.total_pages, f"{load.worker_id}: pages"
        self._loads[number] = changed
