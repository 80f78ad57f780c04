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

from sangam_core.geometry import PAGE_TOKENS
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
        max_sequence_tokens: its longest sequence (prompt + L); workers may differ in it.
        kv_format: blocks are handed over between equal ones; the empty one goes with any.
    """

    worker_id: str
    epoch: str
    role: Role
    outstanding_prefill_tokens: int
    free_pages: int
    total_pages: int
    is_draining: bool = False
    num_blocks: int = 0
    max_sequence_tokens: float = math.inf
    kv_format: str = ""


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
        cost_tokens: its prefill (prompt + L), which is also how long a sequence the worker has to
            take, for the decode as well.
        num_pages: pages for its KV; 0 for the strategy ``none``.
        needs_colocated: the strategy has no KV to move (``none``).
        is_new: no worker has had anything of the request yet.
        kv_format: of a decode, what its KV is in (``WorkerLoad.kv_format``).
    """

    request_id: str
    cost_tokens: int
    num_pages: int
    needs_colocated: bool = False
    is_new: bool = False
    kv_format: str = ""


def place_prefill(fleet: FleetLoad, demand: Demand, policy: PlacementPolicy) -> WorkerLoad | None:
    """Choose the worker for a (re-)prefill (paper, Algorithm 2, hybrid placement).

    The least loaded prefill worker, while one is under theta and has pages. Else the least
    loaded colocated worker under theta whose free pages hold the request after the pending
    decodes. Else none: the request waits in the central line and is bound when load has fallen,
    to whichever worker that happens on first. Where nothing could overflow (static
    disaggregation, or no colocated worker), theta has no say: the least loaded prefill worker
    that has pages. Without prefill workers (colocated serving), the least loaded colocated
    worker that has pages. Workers that take no sequence of that length count as absent.
    """
    dedicated, colocated = prefillers(fleet, demand, policy)
    pages_for_overflow = demand.num_pages + (fleet.pending_decode_pages if demand.num_pages else 0)
    if not dedicated:
        return least_loaded(with_pages(colocated, pages_for_overflow), demand)
    if not colocated:
        return least_loaded(with_pages(dedicated, demand.num_pages), demand)
    # Theta first: past it, which is when requests wait and ask again and again, nobody is left.
    ready = with_pages(_under(dedicated, policy.theta_tokens), demand.num_pages)
    if not ready:
        ready = with_pages(_under(colocated, policy.theta_tokens), pages_for_overflow)
    return least_loaded(ready, demand)


def prefillers(
    fleet: FleetLoad, demand: Demand, policy: PlacementPolicy
) -> tuple[list[WorkerLoad], list[WorkerLoad]]:
    """The prefill and the colocated workers that may prefill a block, whatever they hold now.

    Those that drain, or take no sequence of that length, may not; prefill workers neither where
    nobody could ever decode what they hand over. Where no worker decodes, one may come. Static
    disaggregation has no colocated ones beside prefill workers, even where none of these takes
    the length.
    """
    cost_tokens, active = demand.cost_tokens, [w for w in fleet.workers if not w.is_draining]
    able = [worker for worker in active if worker.max_sequence_tokens >= cost_tokens]
    if demand.needs_colocated:
        return [], of_role(able, Role.COLOCATED)
    dedicated = of_role(able, Role.PREFILL)
    if dedicated:
        dedicated = _that_can_hand_over(dedicated, fleet, demand)
    if not policy.is_overflow_allowed and (dedicated or of_role(active, Role.PREFILL)):
        return dedicated, []
    return dedicated, of_role(able, Role.COLOCATED)


def place_decode(fleet: FleetLoad, demand: Demand) -> WorkerLoad | None:
    """Choose the worker that decodes a prefilled block: most free pages that hold it.

    Of those that take a sequence of that length, and KV of that format.
    """
    num_pages, cost_tokens, prefill_only = demand.num_pages, demand.cost_tokens, Role.PREFILL
    formats = ("", demand.kv_format)
    able = [
        worker
        for worker in fleet.workers
        if worker.free_pages >= num_pages
        and worker.role is not prefill_only
        and not worker.is_draining
        and worker.max_sequence_tokens >= cost_tokens
        and (not demand.kv_format or worker.kv_format in formats)
    ]
    free = list(map(_free_pages, able))
    return _any_of(able, free, max(free, default=0), demand)


def _could_hold(worker: WorkerLoad, demand: Demand) -> bool:
    """Whether it would take the block, were it idle."""
    return (
        worker.max_sequence_tokens >= demand.cost_tokens and worker.total_pages >= demand.num_pages
    )


def _that_can_hand_over(
    dedicated: list[WorkerLoad], fleet: FleetLoad, demand: Demand
) -> list[WorkerLoad]:
    """Of prefill workers, those whose KV a worker that decodes could hold; that may be draining."""
    decoding = [worker for worker in fleet.workers if worker.role is not Role.PREFILL]
    if not decoding:
        return dedicated
    formats = {worker.kv_format for worker in decoding if _could_hold(worker, demand)}
    if "" in formats:
        return dedicated
    return [w for w in dedicated if w.kv_format in formats or (formats and not w.kv_format)]


def can_ever_hold(fleet: FleetLoad, demand: Demand, policy: PlacementPolicy | None = None) -> bool:
    """Whether a block fits the workers at all; if not, refuse it at once.

    Some worker that may prefill it and some worker that may decode it must have the pool and take
    the length. A role that is absent just now refuses nothing: the request waits for it. Those
    that drain count: they may come back.
    """
    return all(
        not able or any(_could_hold(worker, demand) for worker in able)
        for able in _stages(fleet, policy or PlacementPolicy(), is_in_place=demand.needs_colocated)
    )


def longest_tokens(
    fleet: FleetLoad, policy: PlacementPolicy | None = None, *, keeps_kv: bool = True
) -> float:
    """The longest sequence (prompt + L) that fits the workers at all; ``can_ever_hold`` in tokens.

    Args:
        keeps_kv: whether it needs pages, ``PAGE_TOKENS`` to one; without, it needs a colocated
            worker.

    Returns:
        Infinity where no role that it needs is there.
    """
    return min(
        max((_longest_on(worker, keeps_kv=keeps_kv) for worker in able), default=math.inf)
        for able in _stages(fleet, policy or PlacementPolicy(), is_in_place=not keeps_kv)
    )


def _longest_on(worker: WorkerLoad, *, keeps_kv: bool) -> float:
    longest = worker.max_sequence_tokens
    return min(longest, worker.total_pages * PAGE_TOKENS) if keeps_kv else longest


def _stages(
    fleet: FleetLoad, policy: PlacementPolicy, *, is_in_place: bool
) -> tuple[list[WorkerLoad], ...]:
    """The workers that may ever prefill, and those that may ever decode; in place they are one."""
    if is_in_place:
        return (of_role(fleet.workers, Role.COLOCATED),)
    dedicated = of_role(fleet.workers, Role.PREFILL)
    prefilling = [worker for worker in fleet.workers if worker.role.can_prefill]
    is_static = not policy.is_overflow_allowed
    if is_static and any(not worker.is_draining for worker in dedicated):
        prefilling = dedicated
    return prefilling, [worker for worker in fleet.workers if worker.role.can_decode]


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
