"""Places for blocks from the Redis ledger: the driver's seam on one side, ``Placer`` on the other.

Translates, and refuses what can never fit; the search, the waiting and its patience are the
placer's, losses the fleet view's.
"""

import asyncio
from collections.abc import Collection
from dataclasses import replace

from sangam_core.errors import InvalidRequest
from sangam_core.lifecycle import Request
from sangam_core.placement import Demand
from sangam_core.wire import BlockKey
from sangam_router.fleet import FleetView
from sangam_router.ledger import Ledger, Ticket
from sangam_router.ledger.placing import Placement, Placer
from sangam_router.places import Place


class LedgerPlaces:
    """``Places`` over the ledger.

    Args:
        max_waiting: requests that may wait in line, over all routers.
        stall_seconds: patience of requests that have begun; new ones have the placer's.
    """

    def __init__(
        self,
        ledger: Ledger,
        placer: Placer,
        fleet: FleetView,
        *,
        max_waiting: int,
        stall_seconds: float,
    ) -> None:
        self._ledger = ledger
        self._placer = placer
        self._fleet = fleet
        self._max_waiting = max_waiting
        self._stall_seconds = stall_seconds

    async def prefill(
        self, request: Request, demand: Demand, avoid: Collection[str], *, is_new: bool
    ) -> Place:
        """See ``Places.prefill``."""
        if is_new and not self._fleet.can_ever_hold(demand):
            raise InvalidRequest(
                f"max_tokens: prompt and answer are {demand.cost_tokens} tokens "
                f"({demand.num_pages} KV pages), and this server's workers take "
                f"{self._fleet.longest_tokens(demand):g} at most; lower it, or shorten the prompt",
                param="max_tokens",
                code="context_length_exceeded",
            )
        placement = await self._placer.prefill(
            _ticket(request),
            _key(request, request.attempt + 1),
            replace(demand, is_new=is_new),
            avoid=avoid,
            line_limit=self._max_waiting if is_new else None,
            patience_seconds=None if is_new else self._stall_seconds,
        )
        return _place(placement)

    async def decode(self, request: Request, demand: Demand, avoid: Collection[str]) -> Place:
        """See ``Places.decode``."""
        placement = await self._placer.decode(
            _ticket(request),
            _key(request, request.attempt),
            demand,
            avoid=avoid,
            patience_seconds=self._stall_seconds,
        )
        return _place(placement)

    def lost(self, place: Place) -> asyncio.Event:
        """See ``Places.lost``."""
        return self._fleet.lost(place.worker_id, place.epoch)

    async def release_load(self, place: Place) -> None:
        """See ``Places.release_load``."""
        await self._ledger.release_load(place.reservation)

    async def release(self, place: Place) -> None:
        """See ``Places.release``."""
        await self._ledger.release(place.reservation)


def _ticket(request: Request) -> Ticket:
    return Ticket(*request.order)


def _key(request: Request, attempt: int) -> BlockKey:
    return BlockKey(request_id=request.request_id, block=request.block, attempt=attempt)


def _place(placement: Placement) -> Place:
    worker = placement.worker
    return Place(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        url=placement.lease.url,
        role=worker.role,
        reservation=placement.reservation,
        kv_format=worker.kv_format,
    )
