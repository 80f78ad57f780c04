"""The load that a placement must still be under when it is reserved."""

import math

import pytest
from tests.router.ledger.world import demand

from sangam_core.placement import FleetLoad, PlacementPolicy, Role, WorkerLoad
from sangam_router.ledger.placing import load_bound


def worker(name: str, role: Role, load: int = 0, **changes: object) -> WorkerLoad:
    return WorkerLoad(name, f"{name}-1", role, load, 100, 100, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chosen", "fleet", "bound"),
    [
        (worker("p", Role.PREFILL, 50), [], math.inf),
        (worker("p", Role.PREFILL, 50), [worker("c", Role.COLOCATED)], 100.0),
        (worker("c", Role.COLOCATED, 50), [worker("p", Role.PREFILL, 100)], 100.0),
        (worker("c", Role.COLOCATED, 50), [], math.inf),
        (
            worker("c", Role.COLOCATED, 50),
            [worker("p", Role.PREFILL, is_draining=True)],
            math.inf,
        ),
    ],
)
def test_theta_is_checked_again_only_where_it_decided(
    chosen: WorkerLoad, fleet: list[WorkerLoad], bound: float
) -> None:
    policy = PlacementPolicy(theta_tokens=100.0)
    found = load_bound(FleetLoad((chosen, *fleet)), demand(), policy)
    assert found == bound


def test_theta_does_not_bind_what_is_too_long_for_every_colocated_worker() -> None:
    chosen = worker("p", Role.PREFILL, 50)
    fleet = FleetLoad((chosen, worker("c", Role.COLOCATED, max_sequence_tokens=100)))
    policy = PlacementPolicy(theta_tokens=100.0)
    assert load_bound(fleet, demand(cost_tokens=100), policy) == 100.0
    assert load_bound(fleet, demand(cost_tokens=101), policy) == math.inf


def test_theta_does_not_bind_what_must_run_colocated() -> None:
    chosen = worker("c", Role.COLOCATED, 50)
    fleet = FleetLoad((chosen, worker("p", Role.PREFILL)))
    needs = demand(num_pages=0, cost_tokens=10, needs_colocated=True)
    assert load_bound(fleet, needs, PlacementPolicy(theta_tokens=100.0)) == math.inf
