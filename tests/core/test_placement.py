"""Algorithm 2 against a second reading of it, and case by case."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.fleets import (
    DEMANDS,
    FLEETS,
    HYBRID,
    POLICIES,
    STATIC,
    colocated,
    decode,
    demand,
    fleet,
    id_of,
    prefill,
    takes,
    worker,
)

from sangam_core.placement import (
    Demand,
    FleetLoad,
    PlacementPolicy,
    Role,
    can_ever_hold,
    place_decode,
    place_prefill,
)
from sangam_core.placements import place

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
    if not dedicated or not can_ever_hold(loads, block, policy):
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
    is_placed = place_prefill(loads, block, policy) is not None
    if is_placed or not can_ever_hold(loads, block, policy):
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
