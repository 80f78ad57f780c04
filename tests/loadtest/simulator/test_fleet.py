"""The ledger under virtual time: heads of lines only, by arrival; what is freed comes back."""

from dataclasses import replace
from typing import Any

import pytest
from tests.loadtest.simulator.builders import a_system

from sangam_core.placement import Demand, Role
from sangam_loadtest.simulator.fleet import Fleet

COST = 1000


class Asking:
    """A fleet, and who was placed where, in order."""

    def __init__(self, split: str, **changes: Any) -> None:
        system = a_system(split, **changes)
        self.fleet = Fleet(system)
        self.roles = system.split.roles()
        self.placed: list[tuple[str, int]] = []

    def prefill(self, name: str, arrival: float = 0.0, pages: int = 1) -> int | None:
        """Ask for a prefill's place; the worker if it came at once."""
        return self._ask(self.fleet.ask_prefill, name, arrival, pages)

    def decode(self, name: str, arrival: float = 0.0, pages: int = 1) -> int | None:
        """Ask for a decode's place."""
        return self._ask(self.fleet.ask_decode, name, arrival, pages)

    def _ask(self, ask: Any, name: str, arrival: float, pages: int) -> int | None:
        demand = Demand(name, COST, pages)
        ask((arrival, name), demand, lambda worker: self.placed.append((name, worker)))
        return dict(self.placed).get(name)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.placed]

    def prefill_roles(self, names: str) -> list[Role]:
        return [self.roles[worker] for name in names if (worker := self.prefill(name)) is not None]


def test_a_place_is_load_and_pages_until_they_are_released() -> None:
    asking = Asking("1C", total_pages=10)
    assert asking.prefill("a", pages=4) == 0
    (load,) = asking.fleet.loads
    assert (load.outstanding_prefill_tokens, load.free_pages, load.num_blocks) == (COST, 6, 1)
    asking.fleet.release(0, tokens=COST)
    (load,) = asking.fleet.loads
    assert (load.outstanding_prefill_tokens, load.free_pages, load.num_blocks) == (0, 6, 1)
    asking.fleet.release(0, pages=4)
    (load,) = asking.fleet.loads
    assert (load.outstanding_prefill_tokens, load.free_pages, load.num_blocks) == (0, 10, 0)


def test_a_decodes_place_is_pages_alone() -> None:
    asking = Asking("1P1D", total_pages=10)
    assert asking.decode("a", pages=4) == 1
    assert [load.free_pages for load in asking.fleet.loads] == [10, 6]
    assert asking.fleet.loads[1].outstanding_prefill_tokens == 0
    assert [load.num_blocks for load in asking.fleet.loads] == [0, 1]


@pytest.mark.parametrize("release", [{"tokens": 1}, {"pages": 1}])
def test_what_nobody_holds_cannot_be_released(release: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match="worker-0"):
        Asking("1C").fleet.release(0, **release)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_who_waits_is_served_in_order_of_request_arrival(kind: str) -> None:
    asking = Asking("1C", total_pages=4)
    ask = getattr(asking, kind)
    ask("first", arrival=0.0, pages=4)
    for name, arrival in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        ask(name, arrival, pages=4)
    assert asking.fleet.num_waiting == ((3, 0) if kind == "prefill" else (0, 3))
    for _ in range(4):
        asking.fleet.release(0, pages=4)
    assert asking.names == ["first", "early", "middle", "late"]
    assert asking.fleet.num_waiting == (0, 0)


def test_nobody_overtakes_a_head_that_does_not_fit() -> None:
    asking = Asking("1C", total_pages=10)
    asking.prefill("running", 0.0, pages=6)
    assert asking.prefill("large", 1.0, pages=8) is None
    assert asking.prefill("small", 2.0, pages=1) is None
    assert asking.prefill("older", 0.5, pages=1) == 0  # an older one is the head itself
    asking.fleet.release(0, pages=6)
    assert asking.names == ["running", "older", "large", "small"]


def test_a_release_serves_as_many_as_fit() -> None:
    asking = Asking("1C", total_pages=10)
    asking.prefill("running", 0.0, pages=10)
    for number in range(4):
        asking.prefill(f"waiting-{number}", 1.0 + number, pages=4)
    asking.fleet.release(0, pages=10)
    assert asking.names == ["running", "waiting-0", "waiting-1"]


def test_prefills_overflow_only_past_theta_and_wait_when_everything_is() -> None:
    """Two prefill workers and a colocated one; each takes two prefills of theta / 2 and no more."""
    asking = Asking("2P1C", theta_tokens=2 * COST)
    assert asking.prefill_roles("abcd") == [Role.PREFILL] * 4
    assert asking.prefill_roles("ef") == [Role.COLOCATED] * 2
    assert asking.prefill_roles("g") == []
    asking.fleet.release(0, tokens=COST)
    assert asking.placed[-1] == ("g", 0)


def test_static_disaggregation_never_overflows() -> None:
    asking = Asking("1P1C", theta_tokens=COST, is_overflow_allowed=False, total_pages=3)
    assert asking.prefill_roles("abcde") == [Role.PREFILL] * 3
    assert asking.fleet.num_waiting == (2, 0)


def test_pages_of_those_who_wait_for_a_decode_are_kept_free_of_overflow() -> None:
    asking = Asking("1P1C", theta_tokens=COST, total_pages=10)
    asking.decode("running", pages=7)
    assert asking.decode("pending", 0.0, pages=5) is None
    asking.prefill("on the prefill worker", 1.0)
    assert asking.prefill("overflowing", 2.0, pages=2) is None
    asking.fleet.release(1, pages=7)
    assert asking.names[-2:] == ["pending", "overflowing"]


def test_the_policy_is_told_which_demands_are_new() -> None:
    asking = Asking("1C", max_blocks_per_decoder=1.0)
    asking.prefill("running", 0.0)
    seen: list[str] = []
    new = replace(Demand("new", COST, 1), is_new=True)
    asking.fleet.ask_prefill((1.0, "new"), new, lambda worker: seen.append("new"))
    assert seen == []
    asking.fleet.ask_prefill(
        (0.0, "running"), Demand("running", COST, 1), lambda worker: seen.append("next block")
    )
    assert seen == ["next block"]
    for _ in range(2):
        asking.fleet.release(0, pages=1)
    assert seen == ["next block", "new"]
