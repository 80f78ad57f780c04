"""Who can hold a block at all: workers that differ in their longest sequence and in their pools."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.fleets import (
    DEMANDS,
    HYBRID,
    MIXED_FLEETS,
    POLICIES,
    STATIC,
    colocated,
    decode,
    demand,
    fleet,
    id_of,
    prefill,
    worker,
)

from sangam_core.geometry import Geometry
from sangam_core.placement import (
    Demand,
    FleetLoad,
    PlacementPolicy,
    Role,
    can_ever_hold,
    longest_tokens,
    place_decode,
    place_prefill,
)
from sangam_core.placements import PLACEMENTS, place

# -- workers that differ in their longest sequence -----------------------------------------------


def long_demand(**changes: bool) -> Demand:
    return Demand("r", 100, 7, **changes)


@given(MIXED_FLEETS, DEMANDS, POLICIES, st.booleans())
def test_a_worker_that_is_too_short_changes_nothing_for_a_placement(
    loads: FleetLoad, block: Demand, policy: PlacementPolicy, needs_colocated: bool
) -> None:
    block = replace(block, needs_colocated=needs_colocated)
    long_enough = tuple(w for w in loads.workers if w.max_sequence_tokens >= block.cost_tokens)
    others = replace(loads, workers=long_enough)
    assert place_decode(loads, block) == place_decode(others, block)
    # Those that stay out of it still say that the fleet has, or has no, worker of a role.
    if policy.is_overflow_allowed and can_ever_hold(loads, block, policy):
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
    loads = fleet(prefill(load_tokens=5000), colocated(max_sequence_tokens=99), decode())
    assert id_of(place_prefill(loads, long_demand(), HYBRID)) == "p"
    assert id_of(place_prefill(loads, Demand("r", 99, 7), HYBRID)) == "c"


def test_static_disaggregation_does_not_overflow_for_want_of_length() -> None:
    loads = fleet(prefill(max_sequence_tokens=99), colocated())
    for name in PLACEMENTS:
        policy = PlacementPolicy(is_overflow_allowed=False, name=name)
        assert place(loads, long_demand(), policy) is None
    assert not can_ever_hold(loads, long_demand(), STATIC)
    assert can_ever_hold(loads, long_demand(), HYBRID)


def test_nothing_is_prefilled_that_nobody_could_decode() -> None:
    short = decode(max_sequence_tokens=99)
    for name in PLACEMENTS:
        policy = PlacementPolicy(name=name)
        assert place(fleet(prefill(), short), long_demand(), policy) is None
        assert place(fleet(prefill(), decode(total_pages=6)), long_demand(), policy) is None
        assert id_of(place(fleet(prefill(), short, decode("e")), long_demand(), policy)) == "p"
        busy = decode("e", free_pages=0)
        assert id_of(place(fleet(prefill(), short, busy), long_demand(), policy)) == "p"
        assert id_of(place(fleet(prefill()), long_demand(), policy)) == "p", "one may come"


# -- workers that differ in their KV -----------------------------------------------------------


@given(MIXED_FLEETS, DEMANDS, st.sampled_from(["float32", "bfloat16"]))
def test_a_decode_goes_only_where_its_kv_is_taken(
    loads: FleetLoad, block: Demand, kv_format: str
) -> None:
    alike = tuple(w for w in loads.workers if w.kv_format in ("", kv_format))
    chosen = place_decode(loads, replace(block, kv_format=kv_format))
    assert chosen == place_decode(replace(loads, workers=alike), block)


@given(MIXED_FLEETS, DEMANDS, POLICIES)
def test_what_is_prefilled_for_a_hand_over_could_be_decoded_were_all_idle(
    loads: FleetLoad, block: Demand, policy: PlacementPolicy
) -> None:
    chosen = place(loads, block, policy)
    if chosen is None or chosen.role is not Role.PREFILL:
        return
    idle = tuple(
        replace(each, free_pages=each.total_pages, is_draining=False)
        for each in loads.workers
        if each.role is not Role.PREFILL
    )
    handed_over = replace(block, kv_format=chosen.kv_format)
    assert not idle or place_decode(FleetLoad(idle), handed_over) is not None


def test_a_prefill_worker_whose_kv_nobody_takes_is_passed_over() -> None:
    loads = fleet(
        prefill("p1", kv_format="float32"),
        prefill("p2", kv_format="bfloat16", load_tokens=500),
        decode(kv_format="bfloat16"),
    )
    assert id_of(place_prefill(loads, demand(), HYBRID)) == "p2"
    older = replace(loads, workers=(*loads.workers, decode("e")))
    assert id_of(place_prefill(older, demand(), HYBRID)) == "p1", "an older version does not tell"


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


@given(MIXED_FLEETS, DEMANDS, POLICIES)
def test_what_can_be_placed_now_can_be_held(
    loads: FleetLoad, block: Demand, policy: PlacementPolicy
) -> None:
    if place(loads, block, policy) is not None:
        assert can_ever_hold(loads, block, policy)


@given(MIXED_FLEETS, POLICIES, st.integers(0, 200), st.booleans())
def test_the_longest_sequence_is_the_longest_that_can_be_held(
    loads: FleetLoad, policy: PlacementPolicy, prompt_tokens: int, keeps_kv: bool
) -> None:
    geometry = Geometry(prompt_tokens, 1, 32)
    num_pages = geometry.num_pages if keeps_kv else 0
    block = Demand("r", geometry.total_tokens, num_pages, needs_colocated=not keeps_kv)
    longest = longest_tokens(loads, policy, keeps_kv=keeps_kv)
    assert can_ever_hold(loads, block, policy) == (geometry.total_tokens <= longest)
