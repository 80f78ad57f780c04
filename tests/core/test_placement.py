"""Algorithm 2 against a second reading of it, and case by case."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sangam_core.geometry import Geometry
from sangam_core.placement import (
    Demand,
    FleetLoad,
    PlacementPolicy,
    Role,
    WorkerLoad,
    can_ever_hold,
    longest_tokens,
    place_decode,
    place_prefill,
)
from sangam_core.placements import PLACEMENTS, place

HYBRID = PlacementPolicy(theta_tokens=1000)
STATIC = PlacementPolicy(is_overflow_allowed=False)


def worker(
    worker_id: str,
    role: Role,
    *,
    load_tokens: int = 0,
    free_pages: int = 100,
    total_pages: int = 100,
    is_draining: bool = False,
    max_sequence_tokens: float = math.inf,
) -> WorkerLoad:
    return WorkerLoad(
        worker_id,
        f"epoch-of-{worker_id}",
        role,
        load_tokens,
        free_pages,
        total_pages,
        is_draining,
        max_sequence_tokens=max_sequence_tokens,
    )


def prefill(worker_id: str = "p", **loads: Any) -> WorkerLoad:
    return worker(worker_id, Role.PREFILL, **loads)


def decode(worker_id: str = "d", **loads: Any) -> WorkerLoad:
    return worker(worker_id, Role.DECODE, **loads)


def colocated(worker_id: str = "c", **loads: Any) -> WorkerLoad:
    return worker(worker_id, Role.COLOCATED, **loads)


def fleet(*workers: WorkerLoad, pending_decode_pages: int = 0) -> FleetLoad:
    return FleetLoad(workers, pending_decode_pages)


def demand(num_pages: int = 10, *, request_id: str = "r", needs_colocated: bool = False) -> Demand:
    return Demand(request_id, num_pages * 16, num_pages, needs_colocated)


def id_of(chosen: WorkerLoad | None) -> str | None:
    return None if chosen is None else chosen.worker_id


def _random_worker(
    number: int,
    role: Role,
    load_tokens: int,
    free_pages: int,
    used_pages: int,
    is_draining: bool,
    max_sequence_tokens: float,
) -> WorkerLoad:
    return worker(
        f"w{number}",
        role,
        load_tokens=load_tokens,
        free_pages=free_pages,
        total_pages=free_pages + used_pages,
        is_draining=is_draining,
        max_sequence_tokens=max_sequence_tokens,
    )


WORKERS = st.lists(
    st.builds(
        _random_worker,
        number=st.integers(0, 8),
        role=st.sampled_from(Role),
        load_tokens=st.integers(0, 8).map(lambda tens: tens * 10),
        free_pages=st.integers(0, 12),
        used_pages=st.integers(0, 3),
        is_draining=st.booleans(),
        max_sequence_tokens=st.sampled_from([60, 99, 100, 4096, math.inf]),
    ),
    max_size=6,
    unique_by=lambda w: w.worker_id,
)
FLEETS = st.builds(
    lambda workers, pending: FleetLoad(tuple(workers), pending), WORKERS, st.integers(0, 6)
)
DEMANDS = st.builds(
    Demand,
    request_id=st.sampled_from(["r1", "r2", "r3"]),
    cost_tokens=st.sampled_from([60, 100]),
    num_pages=st.integers(1, 8),
)
POLICIES = st.builds(
    PlacementPolicy,
    name=st.sampled_from(sorted(PLACEMENTS)),
    theta_tokens=st.sampled_from([10, 30, 50, math.inf]),
    is_overflow_allowed=st.booleans(),
)


def takes(candidate: WorkerLoad, block: Demand) -> bool:
    """Whether it is there, and takes a sequence of that length."""
    return not candidate.is_draining and candidate.max_sequence_tokens >= block.cost_tokens


# -- every fleet -----------------------------------------------------------------------------


@given(FLEETS, DEMANDS, POLICIES)
def test_a_prefill_goes_only_where_it_may(
    loads: FleetLoad, block: Demand, policy: PlacementPolicy
) -> None:
    chosen = place(loads, block, policy)
    if chosen is None:
        return
    assert chosen in loads.workers
    assert takes(chosen, block)
    assert chosen.role.can_prefill
    assert chosen.free_pages >= block.num_pages
    if chosen.role is Role.COLOCATED:
        assert chosen.free_pages - loads.pending_decode_pages >= block.num_pages


@given(FLEETS, DEMANDS, POLICIES)
def test_overflow_happens_exactly_when_no_prefill_worker_is_under_theta_with_pages(
    loads: FleetLoad, block: Demand, policy: PlacementPolicy
) -> None:
    dedicated = [w for w in loads.workers if w.role is Role.PREFILL and takes(w, block)]
    if not dedicated:
        return
    ready = [
        w
        for w in dedicated
        if w.outstanding_prefill_tokens < policy.theta_tokens and w.free_pages >= block.num_pages
    ]
    chosen = place_prefill(loads, block, policy)
    if ready:
        assert chosen in ready
        least = min(w.outstanding_prefill_tokens for w in ready)
        assert chosen is not None
        assert chosen.outstanding_prefill_tokens == least
    elif chosen is not None and chosen.role is Role.COLOCATED:
        assert policy.is_overflow_allowed
        assert chosen.outstanding_prefill_tokens < policy.theta_tokens
        assert chosen.outstanding_prefill_tokens == min(
            w.outstanding_prefill_tokens
            for w in loads.workers
            if w.role is Role.COLOCATED
            and takes(w, block)
            and w.free_pages - loads.pending_decode_pages >= block.num_pages
        )


@given(FLEETS, DEMANDS, POLICIES)
def test_a_prefill_waits_only_when_no_worker_that_may_take_it_has_the_pages(
    loads: FleetLoad, block: Demand, policy: PlacementPolicy
) -> None:
    if place_prefill(loads, block, policy) is not None:
        return
    is_static = not policy.is_overflow_allowed and any(
        w.role is Role.PREFILL and not w.is_draining for w in loads.workers
    )
    active = [w for w in loads.workers if takes(w, block)]
    dedicated = [w for w in active if w.role is Role.PREFILL]
    could_overflow = policy.is_overflow_allowed and any(w.role is Role.COLOCATED for w in active)
    for w in dedicated:
        is_over_theta = w.outstanding_prefill_tokens >= policy.theta_tokens
        assert w.free_pages < block.num_pages or (is_over_theta and could_overflow)
    if is_static:
        return
    for w in active:
        if w.role is Role.COLOCATED:
            is_over_theta = w.outstanding_prefill_tokens >= policy.theta_tokens
            lacks_pages = w.free_pages - loads.pending_decode_pages < block.num_pages
            assert lacks_pages or (is_over_theta and dedicated)


@given(FLEETS, DEMANDS)
def test_a_decode_goes_to_the_most_free_pages_that_hold_it(loads: FleetLoad, block: Demand) -> None:
    able = [
        w
        for w in loads.workers
        if w.role is not Role.PREFILL and takes(w, block) and w.free_pages >= block.num_pages
    ]
    chosen = place_decode(loads, block)
    assert (chosen is None) == (not able)
    if chosen is not None:
        assert chosen in able
        assert chosen.free_pages == max(w.free_pages for w in able)


@given(FLEETS, DEMANDS, POLICIES, st.randoms(use_true_random=False))
def test_the_order_in_which_workers_are_listed_changes_nothing(
    loads: FleetLoad, block: Demand, policy: PlacementPolicy, random: object
) -> None:
    shuffled = list(loads.workers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    other = FleetLoad(tuple(shuffled), loads.pending_decode_pages)
    assert place_prefill(loads, block, policy) == place_prefill(other, block, policy)
    assert place_decode(loads, block) == place_decode(other, block)


# -- case by case ----------------------------------------------------------------------------


def test_the_least_loaded_prefill_worker_comes_first() -> None:
    loads = fleet(prefill("p1", load_tokens=300), prefill("p2", load_tokens=200), colocated())
    assert id_of(place_prefill(loads, demand(), HYBRID)) == "p2"


def test_a_prefill_worker_at_theta_is_passed_over_for_a_colocated_one() -> None:
    loads = fleet(prefill(load_tokens=1000), colocated(load_tokens=999))
    assert id_of(place_prefill(loads, demand(), HYBRID)) == "c"


def test_with_everybody_at_theta_a_prefill_waits_in_the_central_line() -> None:
    loads = fleet(prefill(load_tokens=5000), colocated(load_tokens=1000))
    assert place_prefill(loads, demand(), HYBRID) is None


def test_without_a_colocated_worker_theta_has_no_say() -> None:
    loads = fleet(prefill(load_tokens=5000), decode())
    assert id_of(place_prefill(loads, demand(), HYBRID)) == "p"


def test_a_prefill_worker_without_pages_does_not_hide_one_that_has_them() -> None:
    loads = fleet(
        prefill("p1", load_tokens=10, free_pages=3), prefill("p2", load_tokens=900), colocated()
    )
    assert id_of(place_prefill(loads, demand(), HYBRID)) == "p2"


def test_want_of_pages_overflows_as_load_does() -> None:
    loads = fleet(prefill(free_pages=9), colocated())
    assert id_of(place_prefill(loads, demand(), HYBRID)) == "c"
    infinite_theta = PlacementPolicy(theta_tokens=math.inf)
    assert id_of(place_prefill(loads, demand(), infinite_theta)) == "c"


def test_overflow_leaves_the_pages_that_pending_decodes_wait_for() -> None:
    full = prefill(free_pages=0)
    assert id_of(place_prefill(fleet(full, colocated(free_pages=15)), demand(), HYBRID)) == "c"
    held_back = fleet(full, colocated(free_pages=15), pending_decode_pages=6)
    assert place_prefill(held_back, demand(), HYBRID) is None


def test_static_disaggregation_never_overflows() -> None:
    busy = fleet(prefill(load_tokens=10**9), colocated())
    assert id_of(place_prefill(busy, demand(), STATIC)) == "p"
    full = fleet(prefill(free_pages=0), colocated())
    assert place_prefill(full, demand(), STATIC) is None


@pytest.mark.parametrize("policy", [HYBRID, STATIC])
def test_without_prefill_workers_serving_is_colocated_at_any_load(policy: PlacementPolicy) -> None:
    loads = fleet(colocated("c1", load_tokens=5000), colocated("c2", load_tokens=4000), decode())
    assert id_of(place_prefill(loads, demand(), policy)) == "c2"


def test_prefill_workers_that_drain_count_as_absent() -> None:
    draining = worker("p", Role.PREFILL, is_draining=True)
    loads = fleet(draining, colocated(load_tokens=5000))
    assert id_of(place_prefill(loads, demand(), HYBRID)) == "c"


def test_a_decode_worker_never_prefills_and_a_prefill_worker_never_decodes() -> None:
    assert place_prefill(fleet(decode()), demand(), HYBRID) is None
    assert place_decode(fleet(prefill()), demand()) is None


def test_a_strategy_without_kv_runs_colocated_only_and_asks_for_no_pages() -> None:
    block = demand(0, needs_colocated=True)
    loads = fleet(prefill(), colocated(free_pages=0), pending_decode_pages=50)
    assert id_of(place_prefill(loads, block, HYBRID)) == "c"
    assert place_prefill(fleet(prefill(), decode()), block, HYBRID) is None


def test_a_colocated_worker_decodes_what_was_prefilled_elsewhere() -> None:
    loads = fleet(prefill(), decode(free_pages=20), colocated(free_pages=30))
    assert id_of(place_decode(loads, demand())) == "c"


def test_equally_good_workers_share_the_requests() -> None:
    loads = fleet(*(colocated(f"c{number}") for number in range(4)))
    chosen = {
        id_of(place_prefill(loads, demand(request_id=f"r{number}"), HYBRID)) for number in range(64)
    }
    assert chosen == {"c0", "c1", "c2", "c3"}


# -- workers that differ in their longest sequence -----------------------------------------------


def long_demand(**changes: bool) -> Demand:
    return Demand("r", 100, 7, **changes)


@given(FLEETS, DEMANDS, POLICIES, st.booleans())
def test_a_worker_that_is_too_short_changes_nothing_for_a_placement(
    loads: FleetLoad, block: Demand, policy: PlacementPolicy, needs_colocated: bool
) -> None:
    block = replace(block, needs_colocated=needs_colocated)
    long_enough = tuple(w for w in loads.workers if w.max_sequence_tokens >= block.cost_tokens)
    others = replace(loads, workers=long_enough)
    assert place_decode(loads, block) == place_decode(others, block)
    if policy.is_overflow_allowed:
        assert place(loads, block, policy) == place(others, block, policy)


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
@pytest.mark.parametrize("needs_colocated", [False, True])
def test_a_long_block_goes_to_the_worker_that_takes_it_whatever_its_load(
    name: str, needs_colocated: bool
) -> None:
    block = long_demand(needs_colocated=needs_colocated)
    loads = fleet(
        prefill("p1", max_sequence_tokens=99),
        colocated("c1", max_sequence_tokens=99),
        colocated("c2", load_tokens=5000, free_pages=20, max_sequence_tokens=100),
    )
    policy = PlacementPolicy(theta_tokens=1000, name=name)
    assert id_of(place(loads, block, policy)) == "c2"
    assert id_of(place_decode(loads, block)) == "c2"


def test_theta_has_no_say_where_no_colocated_worker_takes_the_length() -> None:
    loads = fleet(prefill(load_tokens=5000), colocated(max_sequence_tokens=99))
    assert id_of(place_prefill(loads, long_demand(), HYBRID)) == "p"
    assert id_of(place_prefill(loads, Demand("r", 99, 7), HYBRID)) == "c"


def test_static_disaggregation_does_not_overflow_for_want_of_length() -> None:
    loads = fleet(prefill(max_sequence_tokens=99), colocated())
    for name in PLACEMENTS:
        policy = PlacementPolicy(is_overflow_allowed=False, name=name)
        assert place(loads, long_demand(), policy) is None
    assert not can_ever_hold(loads, long_demand(), STATIC)
    assert can_ever_hold(loads, long_demand(), HYBRID)


# -- what never fits -------------------------------------------------------------------------


def test_a_block_needs_a_pool_to_prefill_in_and_a_pool_to_decode_in() -> None:
    block = demand(50)
    assert can_ever_hold(fleet(prefill(total_pages=50), decode(total_pages=50)), block)
    assert not can_ever_hold(fleet(prefill(total_pages=50), decode(total_pages=49)), block)
    assert not can_ever_hold(fleet(prefill(total_pages=49), decode(total_pages=50)), block)
    assert can_ever_hold(fleet(prefill(total_pages=10), colocated(total_pages=50)), block)


def test_a_block_needs_a_worker_that_takes_it_to_prefill_and_one_to_decode() -> None:
    block = long_demand()
    short: dict[str, Any] = {"max_sequence_tokens": 99}
    long: dict[str, Any] = {"max_sequence_tokens": 100}
    assert can_ever_hold(fleet(prefill(**long), decode(**long)), block)
    assert not can_ever_hold(fleet(prefill(**long), decode(**short)), block)
    assert not can_ever_hold(fleet(prefill(**short), decode(**long)), block)
    assert can_ever_hold(fleet(prefill(**short), decode(**short), colocated(**long)), block)


def test_pool_and_length_must_be_the_same_workers() -> None:
    short, small = colocated("s", max_sequence_tokens=99), colocated("t", total_pages=6)
    assert not can_ever_hold(fleet(short, small), long_demand())
    assert longest_tokens(fleet(short, small)) == 99
    assert longest_tokens(fleet(short, small), keeps_kv=False) == math.inf


def test_without_kv_only_the_length_of_a_colocated_worker_counts() -> None:
    block = Demand("r", 100, 0, needs_colocated=True)
    tiny: dict[str, Any] = {"total_pages": 1}
    assert can_ever_hold(fleet(prefill(), colocated(max_sequence_tokens=100, **tiny)), block)
    assert not can_ever_hold(fleet(prefill(), colocated(max_sequence_tokens=99, **tiny)), block)
    assert can_ever_hold(fleet(prefill()), block), "a colocated worker may come"


def test_without_overflow_a_colocated_pool_is_no_pool_to_prefill_in() -> None:
    loads = fleet(prefill(total_pages=10), colocated(total_pages=50))
    assert not can_ever_hold(loads, demand(50), STATIC)
    assert can_ever_hold(fleet(colocated(total_pages=50)), demand(50), STATIC)


def test_pages_in_use_are_no_reason_to_refuse() -> None:
    assert can_ever_hold(fleet(colocated(free_pages=0, total_pages=50)), demand(50))


def test_a_worker_that_drains_is_no_reason_to_refuse() -> None:
    draining = worker("c", Role.COLOCATED, is_draining=True, max_sequence_tokens=100)
    assert can_ever_hold(fleet(draining, colocated("d", max_sequence_tokens=99)), long_demand())


def test_a_role_that_is_absent_just_now_refuses_nothing() -> None:
    assert can_ever_hold(fleet(), demand(50))
    assert can_ever_hold(fleet(prefill(total_pages=50)), demand(50))
    assert not can_ever_hold(fleet(decode(total_pages=49)), demand(50))
    assert longest_tokens(fleet()) == math.inf


@given(FLEETS, DEMANDS, POLICIES)
def test_what_can_be_placed_now_can_be_held(
    loads: FleetLoad, block: Demand, policy: PlacementPolicy
) -> None:
    placed = place(loads, block, policy)
    if placed is not None and (
        placed.role is Role.COLOCATED or place_decode(loads, block) is not None
    ):
        assert can_ever_hold(loads, block, policy)


@given(FLEETS, POLICIES, st.integers(0, 200), st.booleans())
def test_the_longest_sequence_is_the_longest_that_can_be_held(
    loads: FleetLoad, policy: PlacementPolicy, prompt_tokens: int, keeps_kv: bool
) -> None:
    geometry = Geometry(prompt_tokens, 1, 32)
    num_pages = geometry.num_pages if keeps_kv else 0
    block = Demand("r", geometry.total_tokens, num_pages, needs_colocated=not keeps_kv)
    longest = longest_tokens(loads, policy, keeps_kv=keeps_kv)
    assert can_ever_hold(loads, block, policy) == (geometry.total_tokens <= longest)
