"""Algorithm 2, hybrid placement: where a (re-)prefill goes, and where its decode goes.

Pure: a snapshot of the fleet in, a worker out, or ``None`` when the request has to wait. The
router's driver asks, then reserves the answer in Redis, where one script checks it again; the
simulator asks the same functions.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from sangam_core.ties import tie_breaker


class Role(StrEnum):
    """What a worker admits. One class of worker, three settings."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"

    @property
    def can_prefill(self) -> bool:
        """Whether it takes prefills."""
        return self is not Role.DECODE

    @property
    def can_decode(self) -> bool:
        """Whether it takes decodes."""
        return self is not Role.PREFILL


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker as the ledger sees it.

    Attributes:
        outstanding_prefill_tokens: o_w, reserved prefill tokens whose iteration has not run.
        free_pages: the pool less every reservation.
        total_pages: the pool.
        is_draining: takes no new work (shutdown, or a role switch under way).
        num_blocks: blocks that hold pages on it; one that is being handed over holds some on both
            sides. 0 where no decision looks at it (``placements.counts_blocks``).
    """

    worker_id: str
    epoch: str
    role: Role
    outstanding_prefill_tokens: int
    free_pages: int
    total_pages: int
    is_draining: bool = False
    num_blocks: int = 0


_outstanding_prefill_tokens = attrgetter("outstanding_prefill_tokens")
_free_pages = attrgetter("free_pages")


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """The workers, and the pages that prefilled requests are waiting for (pending decodes)."""

    workers: tuple[WorkerLoad, ...]
    pending_decode_pages: int = 0


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """Which placement, and its parameters.

    Attributes:
        name: of a prefill placement (``sangam_core.placements``); Algorithm 2 by default.
        theta_tokens: load of a prefill worker from which on it is passed over for a colocated
            one. ``inf`` never overflows for load.
        is_overflow_allowed: ``False`` is static disaggregation: prefill workers get every
            prefill, for want of pages too.
        max_blocks_per_decoder: new requests wait while the fleet holds this many blocks for each
            worker that can decode (``placements.is_full``). ``inf``: no bound.
    """

    theta_tokens: float = math.inf
    is_overflow_allowed: bool = True
    name: str = "hybrid"
    max_blocks_per_decoder: float = math.inf


@dataclass(frozen=True, slots=True)
class Demand:
    """What a block asks of a worker.

    Attributes:
        cost_tokens: its prefill (prompt + L).
        num_pages: pages for its KV; 0 for the strategy ``none``.
        needs_colocated: the strategy has no KV to move (``none``).
        is_new: no worker has had anything of the request yet.
    """

    request_id: str
    cost_tokens: int
    num_pages: int
    needs_colocated: bool = False
    is_new: bool = False


def place_prefill(fleet: FleetLoad, demand: Demand, policy: PlacementPolicy) -> WorkerLoad | None:
    """Choose the worker for a (re-)prefill (paper, Algorithm 2, hybrid placement).

    The least loaded prefill worker, while one is under theta and has pages. Else the least
    loaded colocated worker under theta whose free pages hold the request after the pending
    decodes. Else none: the request waits in the central line and is bound when load has fallen,
    to whichever worker that happens on first. Where nothing could overflow (static
    disaggregation, or no colocated worker), theta has no say: the least loaded prefill worker
    that has pages. Without prefill workers (colocated serving), the least loaded colocated
    worker that has pages.
    """
    dedicated = _active(fleet, Role.PREFILL)
    colocated = _active(fleet, Role.COLOCATED)
    pages_for_overflow = demand.num_pages + (fleet.pending_decode_pages if demand.num_pages else 0)
    if demand.needs_colocated or not dedicated:
        return least_loaded(with_pages(colocated, pages_for_overflow), demand)
    if not policy.is_overflow_allowed or not colocated:
        return least_loaded(with_pages(dedicated, demand.num_pages), demand)
    # Theta first: past it, which is when requests wait and ask again and again, nobody is left.
    ready = with_pages(_under(dedicated, policy.theta_tokens), demand.num_pages)
    if not ready:
        ready = with_pages(_under(colocated, policy.theta_tokens), pages_for_overflow)
    return least_loaded(ready, demand)


def place_decode(fleet: FleetLoad, demand: Demand) -> WorkerLoad | None:
    """Choose the worker that decodes a prefilled block: most free pages that hold it."""
    num_pages, prefill_only = demand.num_pages, Role.PREFILL
    able = [
        worker
        for worker in fleet.workers
        if worker.free_pages >= num_pages
        and worker.role is not prefill_only
        and not worker.is_draining
    ]
    free = list(map(_free_pages, able))
    return _any_of(able, free, max(free, default=0), demand)


def can_ever_hold(fleet: FleetLoad, num_pages: int, policy: PlacementPolicy | None = None) -> bool:
    """Whether a block that needs these pages fits the pools at all; if not, refuse it at once.

    Some worker that may prefill it and some worker that may decode it must have the pool. A role
    that is absent just now refuses nothing: the request waits for it.
    """
    policy = policy or PlacementPolicy()
    dedicated = [worker for worker in fleet.workers if worker.role is Role.PREFILL]
    prefilling = [worker for worker in fleet.workers if worker.role.can_prefill]
    is_static = not policy.is_overflow_allowed
    if is_static and any(not worker.is_draining for worker in dedicated):
        prefilling = dedicated
    decoding = [worker for worker in fleet.workers if worker.role.can_decode]
    return all(
        not able or any(worker.total_pages >= num_pages for worker in able)
        for able in (prefilling, decoding)
    )


def _active(fleet: FleetLoad, role: Role) -> list[WorkerLoad]:
    return [worker for worker in fleet.workers if worker.role is role and not worker.is_draining]


def _under(workers: Iterable[WorkerLoad], theta_tokens: float) -> list[WorkerLoad]:
    return [worker for worker in workers if worker.outstanding_prefill_tokens < theta_tokens]


def of_role(workers: Iterable[WorkerLoad], role: Role) -> list[WorkerLoad]:
    """The workers of a role."""
    return [worker for worker in workers if worker.role is role]


def with_pages(workers: Iterable[WorkerLoad], num_pages: int) -> list[WorkerLoad]:
    """The workers with that many pages free."""
    return [worker for worker in workers if worker.free_pages >= num_pages]


def least_loaded(workers: Iterable[WorkerLoad], demand: Demand) -> WorkerLoad | None:
    """The worker of the least o_w."""
    return first(workers, demand, _outstanding_prefill_tokens)


def first(
    workers: Iterable[WorkerLoad], demand: Demand, key: Callable[[WorkerLoad], float]
) -> WorkerLoad | None:
    """The worker of the least key. Ids are hashed among the ties only: a fleet is large."""
    able = list(workers)
    keys = list(map(key, able))
    return _any_of(able, keys, min(keys, default=0), demand)


def _any_of(
    workers: Sequence[WorkerLoad], keys: Sequence[float], best: float, demand: Demand
) -> WorkerLoad | None:
    """The worker whose key is the best one; of several, the one that the request's hash says."""
    num_ties = keys.count(best)
    if num_ties <= 1:
        return workers[keys.index(best)] if num_ties else None
    ties = [worker for worker, value in zip(workers, keys, strict=True) if value == best]
    break_tie = tie_breaker(demand.request_id)
    numbers = [break_tie(worker.worker_id) for worker in ties]
    return ties[numbers.index(min(numbers))]
