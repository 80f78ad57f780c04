"""Gets a block its place: snapshot, policy, reservation, and the waiting line in between.

Decides when to look again. Where a block goes is ``sangam_core.placement``'s decision, whether it
still can is the scripts'. The driver calls ``reserve_a_prefill`` and ``reserve_a_decode``.
"""

import math
from collections.abc import Awaitable, Callable

from sangam_core.placement import (
    Demand,
    FleetLoad,
    PlacementPolicy,
    Role,
    WorkerLoad,
    place_decode,
    place_prefill,
)
from sangam_core.wire import BlockKey
from sangam_router.ledger.ledger import Ledger
from sangam_router.ledger.records import FleetSnapshot, Line, Refused, Reservation, Ticket
from sangam_router.ledger.waiting import Waiter

_NUM_STALE_LOOKS = 3
"""Looks in a row that a changed fleet may spoil before the request waits for a wake-up."""

_LONGEST_WAIT_SECONDS = 60.0
"""A bound on one wait; the oldest waiters are polled far more often."""


def load_bound(
    fleet: FleetLoad, worker: WorkerLoad, demand: Demand, policy: PlacementPolicy
) -> float:
    """The o_w (tokens) that a placement by ``place_prefill`` must still be under when reserved.

    theta, where Algorithm 2 chose the worker for being under it; infinity where it did not look.
    """
    has_dedicated = any(w.role is Role.PREFILL and not w.is_draining for w in fleet.workers)
    if demand.needs_colocated or not has_dedicated:
        return math.inf
    if worker.outstanding_prefill_tokens < policy.theta_tokens:
        return policy.theta_tokens
    return math.inf


async def reserve_a_prefill(
    ledger: Ledger,
    ticket: Ticket,
    key: BlockKey,
    demand: Demand,
    policy: PlacementPolicy,
    *,
    line_limit: int | None = None,
) -> tuple[Reservation, FleetSnapshot]:
    """Wait for a worker for a block's prefill (the caller sets the deadline, by cancelling).

    Args:
        line_limit: as in ``Ledger.join_line``.

    Returns:
        The reservation and the snapshot it was decided on (the worker's lease is in it).

    Raises:
        Overloaded: the request would have to wait, and the line is full.
        Unavailable: Redis does not answer.
    """

    async def look() -> tuple[Reservation | Refused | None, FleetSnapshot]:
        snapshot = await ledger.snapshot()
        worker = place_prefill(snapshot.fleet, demand, policy)
        if worker is None:
            return None, snapshot
        bound = load_bound(snapshot.fleet, worker, demand, policy)
        got = await ledger.reserve_prefill(ticket, key, demand, worker, bound_tokens=bound)
        return got, snapshot

    async def join() -> Waiter:
        return await ledger.join_line(ticket, limit=line_limit)

    return await _look_until_placed(ledger, ticket, Line.PREFILL, look, join)


async def reserve_a_decode(
    ledger: Ledger, ticket: Ticket, key: BlockKey, demand: Demand
) -> tuple[Reservation, FleetSnapshot]:
    """Wait for a worker that decodes a prefilled block; as ``reserve_a_prefill``.

    Raises:
        Unavailable: Redis does not answer.
    """

    async def look() -> tuple[Reservation | Refused | None, FleetSnapshot]:
        snapshot = await ledger.snapshot()
        worker = place_decode(snapshot.fleet, demand)
        if worker is None:
            return None, snapshot
        return await ledger.reserve_decode(ticket, key, demand, worker), snapshot

    async def join() -> Waiter:
        return await ledger.join_decode_line(ticket, demand.num_pages)

    return await _look_until_placed(ledger, ticket, Line.DECODE, look, join)


async def _look_until_placed(
    ledger: Ledger,
    ticket: Ticket,
    line: Line,
    look: Callable[[], Awaitable[tuple[Reservation | Refused | None, FleetSnapshot]]],
    join: Callable[[], Awaitable[Waiter]],
) -> tuple[Reservation, FleetSnapshot]:
    waiter: Waiter | None = None
    num_stale = 0
    try:
        while True:
            got, snapshot = await look()
            if isinstance(got, Reservation):
                return got, snapshot
            num_stale += 1
            if got is not None and not got.must_wait and num_stale < _NUM_STALE_LOOKS:
                continue
            num_stale = 0
            if waiter is None:
                waiter = await join()
            await waiter.wait(_LONGEST_WAIT_SECONDS)
    finally:
        await ledger.leave_line(ticket, line)
