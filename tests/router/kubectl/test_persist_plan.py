"""Making a split last: sets shrink and grow pod by pod, within the pool, never without service."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.router.kubectl.fleets import (
    World,
    a_fleet,
    a_worker,
    decodes,
    fleets,
    prefills,
    sets_of,
    splits,
)

from sangam_core.placement import Role
from sangam_router.kubectl.persist_plan import (
    Debt,
    Grow,
    Settle,
    Shrink,
    num_owed,
    plan_persist,
)
from sangam_router.kubectl.plan import Flip, Worker
from sangam_router.kubectl.splits import ROLES, Split, SplitImpossible


def is_lasting(world: World, split: Split) -> bool:
    """Whether every pod is what it boots as, with as many of each as wanted."""
    return (
        all(world.sets[role].replicas == split.of(role) for role in ROLES)
        and all(each.debt is None for each in world.sets.values())
        and all(
            worker.role is worker.boot_role and worker.annotation is None
            for worker in world.fleet.values()
        )
    )


@given(st.data())
def test_every_split_ends_in_boot_roles_within_the_pool(data: st.DataObject) -> None:
    workers = data.draw(fleets(may_drain=False))
    assume(len(workers) > 1)
    split = data.draw(splits(len(workers)))
    world = World(workers, sets_of(workers))
    for step in plan_persist(workers, sets_of(workers), split):
        world.take(step)
        assert len(world.fleet) <= len(workers)
        assert sum(each.replicas for each in world.sets.values()) <= len(workers)
        assert len(world.fleet) >= len(workers) - 1
    assert is_lasting(world, split)


@given(st.data())
def test_somebody_decodes_and_somebody_prefills_while_pods_are_replaced(
    data: st.DataObject,
) -> None:
    workers = data.draw(fleets())
    split = data.draw(splits(len(workers)))
    try:
        steps = plan_persist(workers, sets_of(workers), split)
    except SplitImpossible:
        assume(False)
        return
    world = World(workers, sets_of(workers))
    is_moving, served = False, decodes(workers)
    for step in steps:
        world.take(step)
        is_moving = is_moving or isinstance(step, Shrink)
        assert decodes(world.fleet.values()) or not (served or is_moving)
        if isinstance(step, Shrink):
            # Else whoever prefills may have been drained by the operator.
            assert prefills(world.fleet.values())


@given(st.data())
def test_it_can_be_taken_up_after_any_step(data: st.DataObject) -> None:
    workers = data.draw(fleets(may_drain=False))
    assume(len(workers) > 1)
    split = data.draw(splits(len(workers)))
    steps = plan_persist(workers, sets_of(workers), split)
    world = World(workers, sets_of(workers))
    for step in steps[: data.draw(st.integers(0, len(steps)))]:
        world.take(step)
    # Growing is two requests, the count and then the donor's annotation: stop between them too.
    if data.draw(st.booleans()):
        for role, each in world.sets.items():
            if each.debt is not None:
                debtor = each.debt
                world.take(
                    Grow(
                        debtor.role,
                        world.sets[debtor.role].name,
                        world.sets[debtor.role].replicas,
                        f"sangam-{debtor.role.value}-{world.sets[debtor.role].replicas}",
                        each.name,
                    )
                )
                world.sets[role] = replace(world.sets[role], debt=debtor)
    sets = [*world.sets.values()]
    assert sum(each.replicas for each in sets) + num_owed(sets) == len(workers)
    for step in plan_persist([*world.fleet.values()], sets, split):
        world.take(step)
        assert len(world.fleet) <= len(workers)
    assert is_lasting(world, split)


@given(st.data())
def test_a_lasting_split_needs_no_step(data: st.DataObject) -> None:
    split = data.draw(st.integers(1, 7).flatmap(splits))
    workers = a_fleet(prefill=split.prefill, decode=split.decode, colocated=split.colocated)
    assert plan_persist(workers, sets_of(workers), split) == ()


def test_the_highest_ordinal_flips_even_where_another_is_less_loaded() -> None:
    workers = [
        replace(worker, load=(9, 1, 1)) if worker.name == "sangam-prefill-4" else worker
        for worker in a_fleet(prefill=5, colocated=3)
    ]
    steps = plan_persist(workers, sets_of(workers), Split(prefill=4, colocated=4))
    assert [str(step) for step in steps] == [
        "sangam-prefill-4: prefill -> colocated",
        "sangam-prefill: 5 -> 4, sangam-prefill-4 goes",
        "sangam-colocated: 3 -> 4, sangam-colocated-3 comes",
    ]


def test_after_a_live_rebalance_of_other_pods_those_return_to_their_boot_roles() -> None:
    workers = [
        a_worker("sangam-prefill-0", Role.COLOCATED),
        a_worker("sangam-prefill-1"),
        *a_fleet(colocated=1),
    ]
    steps = plan_persist(workers, sets_of(workers), Split(prefill=1, colocated=2))
    assert [str(step) for step in steps] == [
        "sangam-prefill-1: prefill -> colocated",
        "sangam-prefill-0: colocated -> prefill",
        "sangam-prefill: 2 -> 1, sangam-prefill-1 goes",
        "sangam-colocated: 1 -> 2, sangam-colocated-1 comes",
    ]


def test_another_worker_bridges_while_the_only_decoder_is_replaced() -> None:
    workers = a_fleet(prefill=3)
    steps = plan_persist(workers, sets_of(workers), Split(prefill=2, colocated=1))
    assert [str(step) for step in steps] == [
        "sangam-prefill-2: prefill -> colocated",
        "sangam-prefill-0: prefill -> colocated",
        "sangam-prefill: 3 -> 2, sangam-prefill-2 goes",
        "sangam-colocated: 0 -> 1, sangam-colocated-0 comes",
        "sangam-prefill-0: colocated -> prefill",
    ]


def test_a_lone_worker_is_not_replaced() -> None:
    workers = a_fleet(prefill=1)
    with pytest.raises(SplitImpossible, match="the only worker that takes blocks"):
        plan_persist(workers, sets_of(workers), Split(colocated=1))


def test_a_role_without_a_set_is_refused() -> None:
    workers = a_fleet(prefill=1, colocated=1)
    sets = [each for each in sets_of(workers) if each.role is not Role.DECODE]
    with pytest.raises(SplitImpossible, match="no StatefulSet for the role decode"):
        plan_persist(workers, sets, Split(prefill=1, decode=1))


def test_what_is_owed_is_given_first() -> None:
    workers = a_fleet(prefill=1, colocated=1)
    sets = sets_of(workers)
    sets[0] = replace(sets[0], debt=Debt(Role.COLOCATED, 2))
    steps = plan_persist(workers, sets, Split(prefill=1, colocated=2))
    assert [type(step) for step in steps] == [Grow]
    sets[2] = replace(sets[2], replicas=2)
    paid = [*workers, a_worker("sangam-colocated-1")]
    assert plan_persist(paid, sets, Split(prefill=1, colocated=2)) == (Settle("sangam-prefill"),)


def test_roles_are_put_right_where_the_counts_already_fit() -> None:
    workers: list[Worker] = [
        a_worker("sangam-prefill-0", Role.COLOCATED),
        a_worker("sangam-colocated-0", Role.PREFILL),
    ]
    steps = plan_persist(workers, sets_of(workers), Split(prefill=1, colocated=1))
    assert [type(step) for step in steps] == [Flip, Flip]
    assert [step.pod for step in steps if isinstance(step, Flip)] == [
        "sangam-colocated-0",
        "sangam-prefill-0",
    ]
