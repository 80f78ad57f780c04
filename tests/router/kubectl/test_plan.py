"""Flips: from any fleet to any split, the fewest, and always somebody who decodes."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.router.kubectl.fleets import World, a_fleet, a_worker, decodes, fleets, splits

from sangam_core.placement import Role
from sangam_router.kubectl.plan import Worker, annotation_for, plan_flips
from sangam_router.kubectl.splits import ROLES, Split, SplitImpossible, split_of


def can_be_assigned(workers: list[Worker], split: Split) -> bool:
    """By trying every assignment with the fewest flips: whether one leaves an undrained decoder."""
    now = split_of([worker.role for worker in workers])
    fewest = sum(max(0, now.of(role) - split.of(role)) for role in ROLES)
    roles = [role for role in ROLES for _ in range(split.of(role))]
    for chosen in set(itertools.permutations(roles)):
        pairs = list(zip(workers, chosen, strict=True))
        if sum(worker.role is not role for worker, role in pairs) == fewest and any(
            role.can_decode and not worker.is_drained for worker, role in pairs
        ):
            return True
    return False


@given(st.data())
def test_any_fleet_becomes_any_split_with_the_fewest_flips(data: st.DataObject) -> None:
    workers = data.draw(fleets(may_drain=False))
    split = data.draw(splits(len(workers)))
    flips = plan_flips(workers, split)
    now = split_of([worker.role for worker in workers])
    world = World(workers)
    for flip in flips:
        world.take(flip)
    assert split_of([worker.role for worker in world.fleet.values()]) == split
    num_moved = sum(not flip.is_tidying for flip in flips)
    assert num_moved == sum(max(0, now.of(role) - split.of(role)) for role in ROLES)
    for worker in world.fleet.values():
        assert worker.annotation == annotation_for(worker.boot_role, worker.role)


@given(st.data())
def test_somebody_decodes_before_and_after_every_flip(data: st.DataObject) -> None:
    workers = data.draw(fleets())
    split = data.draw(splits(len(workers)))
    try:
        flips = plan_flips(workers, split)
    except SplitImpossible:
        assume(False)
        return
    world = World(workers)
    served = decodes(world.fleet.values())
    for flip in flips:
        world.take(flip)
        # A worker's desired and effective roles are the same at the end of a step, and in between
        # the pod of this step is the only one that differs.
        assert decodes(world.fleet.values()) or not served
        served = served or decodes(world.fleet.values())
    assert decodes(world.fleet.values())


@given(st.data())
def test_the_worker_that_flips_away_from_decoding_is_never_the_only_one(
    data: st.DataObject,
) -> None:
    workers = data.draw(fleets())
    split = data.draw(splits(len(workers)))
    try:
        flips = plan_flips(workers, split)
    except SplitImpossible:
        assume(False)
        return
    world = World(workers)
    for flip in flips:
        others = [worker for name, worker in world.fleet.items() if name != flip.pod]
        is_lost = flip.before.can_decode and not flip.after.can_decode
        if is_lost and not world.fleet[flip.pod].is_drained:
            assert decodes(others)
        world.take(flip)


@given(st.data())
def test_a_split_is_refused_only_where_no_choice_of_workers_would_do(data: st.DataObject) -> None:
    workers = data.draw(fleets(max_workers=4))
    split = data.draw(splits(len(workers)))
    try:
        plan_flips(workers, split)
    except SplitImpossible:
        assert not can_be_assigned(workers, split)
    else:
        assert can_be_assigned(workers, split)


@given(st.data())
def test_a_plan_depends_on_no_order_and_its_result_needs_no_further_flip(
    data: st.DataObject,
) -> None:
    workers = data.draw(fleets(may_drain=False))
    split = data.draw(splits(len(workers)))
    flips = plan_flips(workers, split)
    assert plan_flips(data.draw(st.permutations(workers)), split) == flips
    world = World(workers)
    for flip in flips:
        world.take(flip)
    assert plan_flips([*world.fleet.values()], split) == ()


@given(st.data())
def test_an_interrupted_plan_is_taken_up_without_a_flip_more(data: st.DataObject) -> None:
    workers = data.draw(fleets(may_drain=False))
    split = data.draw(splits(len(workers)))
    flips = plan_flips(workers, split)
    num_done = data.draw(st.integers(0, len(flips)))
    world = World(workers)
    for flip in flips[:num_done]:
        world.take(flip)
    rest = plan_flips([*world.fleet.values()], split)
    assert len(rest) == len(flips) - num_done


def test_the_least_loaded_workers_flip() -> None:
    busy = a_worker("sangam-prefill-0", load=(900, 2, 8))
    idle = a_worker("sangam-prefill-1", load=(0, 0, 0))
    busier = a_worker("sangam-prefill-2", load=(900, 3, 8))
    [flip] = plan_flips([busy, idle, busier], Split(prefill=2, colocated=1))
    assert (flip.pod, flip.annotation) == ("sangam-prefill-1", "colocated")


def test_among_equally_loaded_ones_the_highest_ordinal_flips() -> None:
    [flip] = plan_flips(a_fleet(prefill=5, colocated=3), Split(prefill=4, colocated=4))
    assert flip.pod == "sangam-prefill-4"


def test_a_worker_that_comes_home_loses_its_annotation() -> None:
    away = a_worker("sangam-prefill-0", Role.COLOCATED)
    workers = [away, a_worker("sangam-prefill-1"), *a_fleet(colocated=1)]
    [flip] = plan_flips(workers, Split(prefill=2, colocated=1))
    assert (flip.pod, flip.annotation) == ("sangam-prefill-0", None)


def test_who_begins_to_decode_does_so_before_the_only_decoder_changes() -> None:
    workers = a_fleet(prefill=2, decode=1)
    flips = plan_flips(workers, Split(prefill=1, colocated=2))
    assert [flip.before for flip in flips] == [Role.PREFILL, Role.DECODE]


def test_who_goes_on_decoding_changes_before_another_stops() -> None:
    flips = plan_flips(a_fleet(colocated=2), Split(prefill=1, decode=1))
    assert [flip.after for flip in flips] == [Role.DECODE, Role.PREFILL]


def test_a_drained_worker_becomes_the_one_that_prefills() -> None:
    drained = a_worker("sangam-colocated-0", is_drained=True, load=(5, 1, 1))
    [flip] = plan_flips([drained, a_worker("sangam-colocated-1")], Split(prefill=1, colocated=1))
    assert flip.pod == "sangam-colocated-0"


def test_a_refused_wish_is_taken_back_so_that_it_is_not_granted_later() -> None:
    last = a_worker("sangam-colocated-0", annotation="prefill")
    [flip] = plan_flips([last, *a_fleet(prefill=1)], Split(prefill=1, colocated=1))
    assert flip.is_tidying
    assert flip.annotation is None


def test_another_number_of_workers_is_refused_with_both_numbers() -> None:
    with pytest.raises(SplitImpossible, match="makes 8 workers, but the fleet has 3"):
        plan_flips(a_fleet(prefill=2, colocated=1), Split(prefill=5, colocated=3))


def test_a_split_in_which_only_drained_workers_would_decode_is_refused() -> None:
    drained = a_worker("sangam-colocated-0", is_drained=True)
    with pytest.raises(SplitImpossible, match="undrain"):
        plan_flips([drained, *a_fleet(prefill=1)], Split(prefill=1, colocated=1))
