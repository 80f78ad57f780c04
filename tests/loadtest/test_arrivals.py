"""Schedules have the rate and the burstiness they are asked for, and are seeded."""

import numpy as np
import pytest

from sangam_core.errors import ConfigurationError
from sangam_loadtest.arrivals import ArrivalProcess, Arrivals, schedule

NUM_REQUESTS = 40_000
RATE = 5.0


def gaps(process: ArrivalProcess, **options: float) -> "np.ndarray":
    times = schedule(Arrivals(process, RATE, **options), NUM_REQUESTS)
    assert times[0] == 0
    return np.diff(times)


@pytest.mark.parametrize("process", ["poisson", "gamma", "constant"])
def test_the_mean_rate_is_the_one_asked_for(process: str) -> None:
    assert 1 / gaps(ArrivalProcess(process)).mean() == pytest.approx(RATE, rel=0.04)


def test_poisson_gaps_are_not_truncated() -> None:
    found = gaps(ArrivalProcess.POISSON) * RATE
    assert found.std() == pytest.approx(1, rel=0.03)
    assert (found > 3).mean() == pytest.approx(np.exp(-3), rel=0.1)
    assert found.max() > 8


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_burstiness_asked_for(burstiness: float) -> None:
    found = gaps(ArrivalProcess.GAMMA, burstiness=burstiness)
    assert found.var() / found.mean() ** 2 == pytest.approx(burstiness, rel=0.08)


def test_clipped_gaps_state_their_true_rate() -> None:
    arrivals = Arrivals(ArrivalProcess.CLIPPED, RATE)
    found = gaps(ArrivalProcess.CLIPPED)
    assert found.max() == pytest.approx(3 / RATE)
    assert arrivals.true_rate == pytest.approx(RATE * 1.0524, rel=1e-3)
    assert 1 / found.mean() == pytest.approx(arrivals.true_rate, rel=0.02)


def test_a_seed_gives_the_same_schedule() -> None:
    one = schedule(Arrivals(rate=1, seed=1), 50)
    assert (one == schedule(Arrivals(rate=1, seed=1), 50)).all()
    assert (one != schedule(Arrivals(rate=1, seed=2), 50)).any()


def test_another_rate_stretches_the_same_schedule() -> None:
    slow, fast = schedule(Arrivals(rate=1), 50), schedule(Arrivals(rate=4), 50)
    assert fast * 4 == pytest.approx(slow)


def test_time_stamps_are_kept_or_scaled_to_a_rate() -> None:
    stamps = [10.0, 11.0, 14.0]
    kept = schedule(Arrivals(ArrivalProcess.TRACE), 3, stamps)
    assert kept.tolist() == [0, 1, 4]
    scaled = schedule(Arrivals(ArrivalProcess.TRACE, rate=2.0), 3, stamps)
    assert scaled.tolist() == pytest.approx([0, 0.25, 1])


@pytest.mark.parametrize(
    ("stamps", "told"),
    [([None, None], "only 0 of 2"), ([2.0, 1.0], "backwards"), ([1.0, 1.0], "equal")],
)
def test_stamps_that_make_no_schedule_are_refused(stamps: list[float | None], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        schedule(Arrivals(ArrivalProcess.TRACE, rate=1.0), 2, stamps)


@pytest.mark.parametrize(
    ("process", "rate"), [("poisson", None), ("poisson", 0.0), ("trace", -1.0), ("gamma", np.inf)]
)
def test_rates_that_are_none_are_refused(process: str, rate: float | None) -> None:
    with pytest.raises(ConfigurationError, match="rate"):
        Arrivals(ArrivalProcess(process), rate)
