"""Virtual time: in order, ties in the order in which they were set, and never past a limit."""

import pytest

from sangam_loadtest.simulator.clock import VirtualClock


def turned(clock: VirtualClock, until: float = float("inf")) -> None:
    while clock.turn(until):
        pass


def test_events_happen_in_the_order_of_their_times() -> None:
    clock, seen = VirtualClock(), []
    for seconds in (3.0, 1.0, 2.0):
        clock.at(seconds, lambda: seen.append(clock.now))
    turned(clock)
    assert seen == [1.0, 2.0, 3.0]


def test_events_of_one_moment_happen_in_the_order_in_which_they_were_set() -> None:
    clock, seen = VirtualClock(), []
    for name in "bac":
        clock.at(1.0, lambda name=name: seen.append(name))
    clock.at(1.0, lambda: clock.after(0.0, lambda: seen.append("last")))
    clock.at(1.0, lambda: seen.append("d"))
    turned(clock)
    assert seen == ["b", "a", "c", "d", "last"]


def test_time_stands_still_at_a_limit() -> None:
    clock, seen = VirtualClock(), []
    for seconds in (1.0, 2.0, 3.0):
        clock.at(seconds, lambda: seen.append(clock.now))
    turned(clock, until=2.0)
    assert (seen, clock.now) == ([1.0, 2.0], 2.0)
    assert not clock.turn(2.5)
    assert clock.now == 2.0
    assert clock.turn()


def test_nothing_can_be_set_for_the_past() -> None:
    clock = VirtualClock()
    clock.at(1.0, lambda: None)
    clock.turn()
    with pytest.raises(AssertionError, match="forward"):
        clock.at(0.5, lambda: None)
