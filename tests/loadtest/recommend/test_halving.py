"""Successive halving finds the best with less work, and keeps a candidate of each mode."""

from collections.abc import Sequence

import pytest
from tests.loadtest.recommend.builders import LATENCY, candidate, trial

from sangam_loadtest.recommend.candidates import Candidate, Mode
from sangam_loadtest.recommend.halving import RATE_STEP, halved, kept, next_rate, tells
from sangam_loadtest.recommend.trials import Trial


def worth(made: Trial) -> float:
    return made.slack((LATENCY,))


class Measured:
    """Trials whose latency is the candidate's tau in milliseconds."""

    def __init__(self) -> None:
        self.rungs: list[tuple[int, int]] = []

    def __call__(self, candidates: Sequence[Candidate], length: int) -> list[Trial]:
        self.rungs.append((len(candidates), length))
        return [trial(c.policy.tau / 1000, c, num_requests=length) for c in candidates]


def test_every_rung_halves_the_candidates_and_the_best_wins() -> None:
    candidates = [candidate(tau=tau) for tau in (9, 3, 5, 1, 7, 2, 8, 6)]
    measured = Measured()
    last = halved(candidates, [10, 20, 40], measured, worth, 1)
    assert measured.rungs == [(8, 10), (4, 20), (2, 40)]
    assert [t.candidate.policy.tau for t in last] == [1, 2]
    assert {t.job.num_requests for t in last} == {40}


def test_the_best_of_a_mode_goes_on_however_bad_it_is() -> None:
    candidates = [candidate(tau=tau) for tau in (1, 2, 3, 4)]
    candidates += [candidate("5P3D", tau=tau) for tau in (900, 800)]
    last = halved(candidates, [10, 20, 40], Measured(), worth, 1)
    assert [(t.candidate.mode, t.candidate.policy.tau) for t in last] == [
        (Mode.COLOCATED, 1),
        (Mode.COLOCATED, 2),
        (Mode.DISAGGREGATED, 800),
    ]


def test_no_rung_has_fewer_than_asked_for() -> None:
    measured = Measured()
    halved([candidate(tau=tau) for tau in range(1, 7)], [1, 2], measured, worth, 5)
    assert measured.rungs == [(6, 1), (5, 2)]


def test_rungs_that_would_leave_out_nobody_are_left_out_themselves() -> None:
    measured = Measured()
    halved([candidate(tau=tau) for tau in range(1, 7)], [1, 2, 3], measured, worth, 5)
    assert measured.rungs == [(6, 1), (5, 3)]
    alone = Measured()
    halved([candidate()], [1, 2, 3], alone, worth, 1)
    assert alone.rungs == [(1, 3)]


def test_equals_keep_their_order() -> None:
    same = [trial(3.0, candidate(tau=tau)) for tau in (30, 20, 10)]
    assert [t.candidate.policy.tau for t in kept(same, worth, 2)] == [30, 20]


@pytest.mark.parametrize(
    ("worths", "expected"),
    [
        ([0.5, 0.4, 0.3, -0.1], 10 * RATE_STEP),
        ([0.2, -0.1, -0.3], 10),
        ([0.3, 0.2, 0.1], 10),
        ([-0.1, -0.5], 10 / RATE_STEP),
    ],
)
def test_the_next_rate_is_where_some_hold_and_some_do_not(
    worths: list[float], expected: float
) -> None:
    assert next_rate(10, 5, worths) == pytest.approx(expected)


def test_no_rate_is_below_the_one_asked_for() -> None:
    assert next_rate(10, 9.5, [-1.0]) == 9.5


def test_a_higher_rate_needs_a_run_that_is_long_against_the_latency() -> None:
    before = trial(3.0, rate=10.0)
    assert tells(before, 300, 12.5)
    assert not tells(before, 299, 12.5)
