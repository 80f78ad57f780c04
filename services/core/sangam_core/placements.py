"""Prefill placements by the name that settings have, and the bound on what a fleet takes on.

A placement is a pure function of the fleet's loads, a block's demand and the policy's parameters.
Adding one is a function and a line in ``PLACEMENTS``; ``loadtest simulate --placement`` tries it,
the reproduction's README says what was tried and what it gave. Called by the router's placer and
by the simulator.
"""

import math
from collections.abc import Callable

from sangam_core.geometry import PAGE_TOKENS
from sangam_core.placement import (
    Demand,
    FleetLoad,
    PlacementPolicy,
    Role,
    WorkerLoad,
    first,
    place_prefill,
    prefillers,
    with_pages,
)

PrefillPlacement = Callable[[FleetLoad, Demand, PlacementPolicy], WorkerLoad | None]
"""Chooses the worker for a (re-)prefill; ``None``: the request waits in the central line."""

_COLOCATED_SLOWDOWN = 2.0
_SLOWDOWN_PER_BLOCK = 0.1
_DECODE_WEIGHT = 0.3


def place_by_delay(fleet: FleetLoad, demand: Demand, policy: PlacementPolicy) -> WorkerLoad | None:
    """Choose the worker with the least predicted delay of the prefill: no threshold to overflow at.

    Shortest expected delay for unlike servers (S. A. Banawan and J. Zahorjan, "Load sharing in
    heterogeneous queueing systems", INFOCOM 1989), with tokens for time: on a prefill worker the
    delay is o_w and the prefill itself; on a colocated worker that many tokens times
    2 + 0.1 for each block that it holds, since decodes share its iterations and stand still while
    it prefills. The two numbers were found by simulation: loadtest/reproduction. Algorithm 2
    overflows only once every prefill worker is past theta, and then overflows everything.

    Theta and the rules for pages are Algorithm 2's, as is everything where nothing can overflow.
    """
    dedicated, colocated = prefillers(fleet, demand, policy)
    if not dedicated or not colocated:
        return place_prefill(fleet, demand, policy)
    pending = fleet.pending_decode_pages if demand.num_pages else 0
    able = with_pages(dedicated, demand.num_pages)
    able += with_pages(colocated, demand.num_pages + pending)
    under = [w for w in able if w.outstanding_prefill_tokens < policy.theta_tokens]
    return first(under, demand, lambda worker: _predicted_delay(worker, demand))


def _predicted_delay(worker: WorkerLoad, demand: Demand) -> float:
    """Tokens that the worker computes before the prefill's iteration has run."""
    tokens = worker.outstanding_prefill_tokens + demand.cost_tokens
    if worker.role is Role.PREFILL:
        return tokens
    return tokens * (_COLOCATED_SLOWDOWN + _SLOWDOWN_PER_BLOCK * worker.num_blocks)


def place_decode_aware(
    fleet: FleetLoad, demand: Demand, policy: PlacementPolicy
) -> WorkerLoad | None:
    """Algorithm 2, but without prefill workers the decodes of a colocated worker count as well.

    The least o_w and 0.3 of the tokens whose KV the worker holds: decodes slow a prefill down, but
    each pass of theirs costs far less than it.
    """
    dedicated, colocated = prefillers(fleet, demand, policy)
    if dedicated or not colocated:
        return place_prefill(fleet, demand, policy)
    pending = fleet.pending_decode_pages if demand.num_pages else 0
    return first(with_pages(colocated, demand.num_pages + pending), demand, _load_with_decodes)


def _load_with_decodes(worker: WorkerLoad) -> float:
    held_tokens = PAGE_TOKENS * (worker.total_pages - worker.free_pages)
    return worker.outstanding_prefill_tokens + _DECODE_WEIGHT * held_tokens


HYBRID = "hybrid"
"""Name of Algorithm 2."""

SHORTEST_DELAY = "shortest_delay"
"""Name of the overflow by predicted delay."""

DECODE_AWARE = "decode_aware"
"""Name of the placement that counts decodes on colocated workers."""

PLACEMENTS: dict[str, PrefillPlacement] = {
    HYBRID: place_prefill,
    SHORTEST_DELAY: place_by_delay,
    DECODE_AWARE: place_decode_aware,
}
"""Prefill placements by the name that settings have."""


def counts_blocks(policy: PlacementPolicy) -> bool:
    """Whether a decision by this policy looks at ``WorkerLoad.num_blocks``."""
    return policy.name == SHORTEST_DELAY or policy.max_blocks_per_decoder != math.inf


def place(fleet: FleetLoad, demand: Demand, policy: PlacementPolicy) -> WorkerLoad | None:
    """Choose the worker for a (re-)prefill by the policy's placement, unless the fleet is full.

    Raises:
        KeyError: there is no placement of that name (settings have checked it).
    """
    if demand.is_new and is_full(fleet, demand, policy):
        return None
    return PLACEMENTS[policy.name](fleet, demand, policy)


def is_full(fleet: FleetLoad, demand: Demand, policy: PlacementPolicy) -> bool:
    """Whether a new request has to wait for older ones to finish: a bound on multiprogramming.

    Decodes share a worker, so that every request taken on slows all others, while from some 8 to
    16 blocks on a pass gains nothing by another one. Requests that have begun are never held up,
    and those without pages (the strategy ``none``) neither count nor wait. Replicas of the router
    may overshoot together by a request each.
    """
    if policy.max_blocks_per_decoder == math.inf or not demand.num_pages:
        return False
    active = [worker for worker in fleet.workers if not worker.is_draining]
    num_decoders = sum(worker.role.can_decode for worker in active)
    num_blocks = sum(worker.num_blocks for worker in active)
    return num_blocks >= policy.max_blocks_per_decoder * num_decoders
