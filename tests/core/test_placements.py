"""Placements by name beside Algorithm 2 (``test_placement``), and the bound on a fleet's blocks."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sangam_core.placement import (
    Demand,
    FleetLoad,
    PlacementPolicy,
    Role,
    WorkerLoad,
    place_prefill,
)
from sangam_core.placements import HYBRID, PLACEMENTS, SHORTEST_DELAY, counts_blocks, is_full, place

PAGES = 1000


def worker(
    worker_id: str, role: Role, *, load: int = 0, held: int = 0, blocks: int = 0, **changes: Any
) -> WorkerLoad:
    """A worker that holds pages and blocks."""
    return WorkerLoad(worker_id, "0", role, load, PAGES - held, PAGES, num_blocks=blocks, **changes)


def demand(
    *, cost: int = 1000, pages: int = 50, is_new: bool = False, needs_colocated: bool = False
) -> Demand:
    return Demand("r", cost, pages, needs_colocated, is_new)


def chosen(name: str, *workers: WorkerLoad, asked: Demand | None = None, **policy: float) -> str:
    """The id of the worker that a placement chooses; empty where the request waits."""
    found = place(
        FleetLoad(workers),
        asked or demand(),
        PlacementPolicy(name=name, **policy),  # type: ignore[arg-type]
    )
    return found.worker_id if found else ""


def test_the_name_says_which_placement_is_asked() -> None:
    fleet = (worker("p", Role.PREFILL, load=3000), worker("c", Role.COLOCATED))
    assert chosen(HYBRID, *fleet) == "p"
    assert chosen(SHORTEST_DELAY, *fleet) == "c"


def test_a_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError):
        chosen("nearest", worker("c", Role.COLOCATED))


def test_overflow_begins_where_an_idle_colocated_worker_would_be_done_sooner() -> None:
    # 1,000 tokens on an idle colocated worker count as 2,000.
    assert (
        chosen(SHORTEST_DELAY, worker("p", Role.PREFILL, load=900), worker("c", Role.COLOCATED))
        == "p"
    )
    assert (
        chosen(SHORTEST_DELAY, worker("p", Role.PREFILL, load=1100), worker("c", Role.COLOCATED))
        == "c"
    )


def test_decodes_on_a_colocated_worker_put_prefills_off() -> None:
    waiting = worker("p", Role.PREFILL, load=1400)
    assert chosen(SHORTEST_DELAY, waiting, worker("c", Role.COLOCATED)) == "c"
    assert chosen(SHORTEST_DELAY, waiting, worker("c", Role.COLOCATED, blocks=10)) == "p"


def test_blocks_count_alike_whatever_their_size_and_that_of_the_prefill() -> None:
    waiting, few_long = worker("p", Role.PREFILL, load=1400), worker("c", Role.COLOCATED, blocks=2)
    for held, pages in ((900, 1), (2, 90)):
        few = replace(few_long, free_pages=PAGES - held)
        many = replace(few, num_blocks=10)
        assert chosen(SHORTEST_DELAY, waiting, few, asked=demand(pages=pages)) == "c"
        assert chosen(SHORTEST_DELAY, waiting, many, asked=demand(pages=pages)) == "p"


def test_theta_bounds_the_load_of_every_worker_that_is_chosen_by_delay() -> None:
    fleet = (worker("p", Role.PREFILL, load=3000), worker("c", Role.COLOCATED, load=3000))
    assert chosen(SHORTEST_DELAY, *fleet, theta_tokens=3000) == ""
    assert chosen(SHORTEST_DELAY, *fleet, theta_tokens=3001) == "p"


def test_overflow_by_delay_leaves_pages_to_pending_decodes() -> None:
    fleet = (worker("p", Role.PREFILL, load=9000), worker("c", Role.COLOCATED, held=900))
    policy = PlacementPolicy(name=SHORTEST_DELAY)
    free = place(FleetLoad(fleet, pending_decode_pages=50), demand(), policy)
    spoken_for = place(FleetLoad(fleet, pending_decode_pages=51), demand(), policy)
    assert free is not None
    assert free.worker_id == "c"
    assert spoken_for is not None
    assert spoken_for.worker_id == "p"


@given(
    st.lists(
        st.tuples(
            st.sampled_from([Role.PREFILL, Role.DECODE]),
            st.integers(0, 9000),
            st.integers(0, PAGES),
        ),
        max_size=5,
    ),
    st.sampled_from([SHORTEST_DELAY, "decode_aware"]),
)
def test_where_nothing_can_overflow_every_placement_is_algorithm_2(
    shapes: list[tuple[Role, int, int]], name: str
) -> None:
    fleet = FleetLoad(
        tuple(
            worker(f"w{n}", role, load=load, held=held)
            for n, (role, load, held) in enumerate(shapes)
        )
    )
    policy = PlacementPolicy(name=name)
    assert place(fleet, demand(), policy) == place_prefill(fleet, demand(), policy)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Role)), st.integers(0, 9000), st.integers(0, PAGES), st.booleans()
        ),
        max_size=6,
    ),
    st.sampled_from(list(PLACEMENTS)),
    st.booleans(),
)
def test_whoever_is_chosen_may_prefill_has_the_pages_and_does_not_drain(
    shapes: list[tuple[Role, int, int, bool]], name: str, needs_colocated: bool
) -> None:
    fleet = FleetLoad(
        tuple(
            worker(f"w{n}", role, load=load, held=held, is_draining=is_draining)
            for n, (role, load, held, is_draining) in enumerate(shapes)
        )
    )
    found = place(fleet, demand(needs_colocated=needs_colocated), PlacementPolicy(name=name))
    able = [
        w
        for w in fleet.workers
        if w.role.can_prefill
        and not w.is_draining
        and w.free_pages >= 50
        and (w.role is Role.COLOCATED or not needs_colocated)
    ]
    assert (found is None) == (not able)
    assert found is None or found in able


def test_decode_aware_placement_counts_what_a_worker_holds() -> None:
    busy, idle = worker("busy", Role.COLOCATED, held=500), worker("idle", Role.COLOCATED, load=1000)
    assert chosen(HYBRID, busy, idle) == "busy"
    assert chosen("decode_aware", busy, idle) == "idle"


def test_a_new_request_waits_while_the_fleet_is_full_and_one_that_has_begun_does_not() -> None:
    fleet = (worker("p", Role.PREFILL, blocks=4), worker("c", Role.COLOCATED, blocks=8))
    bound = {"max_blocks_per_decoder": 12.0}
    assert chosen(HYBRID, *fleet, asked=demand(is_new=True), **bound) == ""
    assert chosen(HYBRID, *fleet, asked=demand(), **bound) == "p"
    assert chosen(HYBRID, *fleet, asked=demand(is_new=True), max_blocks_per_decoder=12.1) == "p"


def test_only_workers_that_decode_make_room_for_more_blocks() -> None:
    held = worker("c", Role.COLOCATED, blocks=12)
    policy = PlacementPolicy(max_blocks_per_decoder=12)
    alone = FleetLoad((held, worker("p", Role.PREFILL)))
    beside = FleetLoad((held, worker("d", Role.DECODE)))
    drained = FleetLoad((held, worker("d", Role.DECODE, is_draining=True)))
    assert is_full(alone, demand(is_new=True), policy)
    assert not is_full(beside, demand(is_new=True), policy)
    assert is_full(drained, demand(is_new=True), policy)


def test_an_idle_fleet_is_never_full_and_without_a_bound_none_is() -> None:
    idle = FleetLoad((worker("c", Role.COLOCATED),))
    assert not is_full(idle, demand(), PlacementPolicy(max_blocks_per_decoder=0.5))
    crowded = FleetLoad((worker("c", Role.COLOCATED, blocks=100),))
    assert not is_full(crowded, demand(), PlacementPolicy(max_blocks_per_decoder=math.inf))


def test_a_fleet_is_as_full_for_a_short_request_as_for_a_long_one() -> None:
    policy = PlacementPolicy(max_blocks_per_decoder=3)
    for num_blocks, is_bounded in ((2, False), (3, True)):
        fleet = FleetLoad((worker("c", Role.COLOCATED, held=700, blocks=num_blocks),))
        for pages in (1, 50, 300):
            assert is_full(fleet, demand(pages=pages), policy) is is_bounded


def test_what_keeps_no_pages_is_never_held_up_by_the_bound() -> None:
    fleet = FleetLoad((worker("c", Role.COLOCATED, blocks=9),))
    assert not is_full(fleet, demand(pages=0), PlacementPolicy(max_blocks_per_decoder=1))


@pytest.mark.parametrize(
    ("policy", "is_counted"),
    [
        (PlacementPolicy(), False),
        (PlacementPolicy(name="decode_aware", theta_tokens=100), False),
        (PlacementPolicy(name=SHORTEST_DELAY), True),
        (PlacementPolicy(max_blocks_per_decoder=40), True),
    ],
)
def test_blocks_are_counted_where_a_decision_looks_at_them(
    policy: PlacementPolicy, is_counted: bool
) -> None:
    assert counts_blocks(policy) is is_counted
