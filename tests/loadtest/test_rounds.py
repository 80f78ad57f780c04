"""Contenders take turns, rounds stop in time, and ratios are taken within a round."""

from collections.abc import Callable

import pytest

from benchmarks.rounds import Measurement, run_rounds, summarise


class Clock:
    """Time that passes only when a contender runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measured(wall_seconds: float, num_tokens: int = 100) -> Measurement:
    return Measurement(num_tokens, 50, 25, wall_seconds, wall_seconds / 2)


def contender(clock: Clock, *seconds: float) -> Callable[[], Measurement]:
    runs = iter(seconds)

    def run() -> Measurement:
        took = next(runs)
        clock.now += took
        return measured(took)

    return run


def test_contenders_take_turns_and_every_other_round_runs_backwards() -> None:
    clock, order = Clock(), []
    contenders = {name: contender(clock, 1, 1, 1) for name in "abc"}
    run_rounds(contenders, 3, 100, lambda index, name, seen: order.append((index, name)), clock)
    assert [name for _, name in order] == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert [index for index, _ in order] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_rounds_end_before_one_would_go_beyond_the_budget() -> None:
    clock = Clock()
    contenders = {"a": contender(clock, *[2] * 9), "b": contender(clock, *[3] * 9)}
    rounds = run_rounds(contenders, 9, 16.0, lambda *_: None, clock)
    assert len(rounds) == 3
    assert clock.now == 15


def test_one_round_is_run_whatever_the_budget() -> None:
    clock = Clock()
    rounds = run_rounds({"a": contender(clock, 5)}, 3, 0.0, lambda *_: None, clock)
    assert len(rounds) == 1


def test_a_ratio_is_taken_within_a_round_before_the_median() -> None:
    rounds = [
        {"slow": measured(4.0), "fast": measured(2.0)},
        {"slow": measured(40.0), "fast": measured(10.0)},  # the machine was busy
        {"slow": measured(4.0), "fast": measured(1.0)},
    ]
    slow, fast = summarise(rounds, "slow")
    assert slow.ratio == 1.0
    assert (fast.lowest_ratio, fast.ratio, fast.highest_ratio) == (2.0, 4.0, 4.0)
    assert fast.tokens_per_second == pytest.approx(50.0)
    assert (fast.tokens_per_pass, fast.passes_per_iteration) == (2.0, 2.0)
