"""Synthetic traces have Table 1's statistics, are seeded, and know sessions."""

from itertools import islice

import numpy as np
import pytest

from sangam_core.errors import ConfigurationError
from sangam_loadtest.traces.entropy import LengthStatistics, fitted_masses
from sangam_loadtest.traces.request import TraceRequest
from sangam_loadtest.traces.synthetic import (
    ARXIV,
    SHAREGPT,
    Sessions,
    SyntheticTrace,
    synthetic_requests,
)

NUM_REQUESTS = 20_000
TABLE_1 = [
    (SHAREGPT, "prompt_tokens", 795, 2007, 596),
    (SHAREGPT, "output_tokens", 266, 874, 206),
    (ARXIV, "prompt_tokens", 2827, 3923, 890),
    (ARXIV, "output_tokens", 162, 360, 73),
]


def drawn(
    trace: SyntheticTrace, seed: int = 0, sessions: Sessions | None = None, count: int = 500
) -> list[TraceRequest]:
    return list(islice(synthetic_requests(trace, seed, sessions), count))


def lag_1_correlation(values: list[int]) -> float:
    return float(np.corrcoef(values[:-1], values[1:])[0, 1])


@pytest.mark.parametrize("sessions", [None, Sessions()])
@pytest.mark.parametrize(("trace", "part", "median", "p99", "std"), TABLE_1)
def test_samples_have_the_statistics_of_table_1(
    trace: SyntheticTrace, part: str, median: int, p99: int, std: int, sessions: Sessions | None
) -> None:
    requests = drawn(trace, sessions=sessions, count=NUM_REQUESTS)
    values = np.array([getattr(request, part) for request in requests])
    few_per_cent = 0.03 if sessions is None else 0.05
    assert np.median(values) == pytest.approx(median, rel=few_per_cent)
    assert np.percentile(values, 99) == pytest.approx(p99, rel=few_per_cent)
    assert values.std() == pytest.approx(std, rel=few_per_cent)
    assert values.min() >= 1


@pytest.mark.parametrize("trace", [SHAREGPT, ARXIV])
def test_the_fitted_distribution_itself_has_the_statistics(trace: SyntheticTrace) -> None:
    for known in (trace.prompt, trace.output):
        masses = fitted_masses(known)
        lengths = np.arange(known.low, known.high + 1)
        cumulative = np.cumsum(masses)
        mean = masses @ lengths
        assert cumulative[-1] == pytest.approx(1)
        assert cumulative[known.median - known.low] == pytest.approx(0.5)
        assert cumulative[known.p99 - known.low] == pytest.approx(0.99)
        assert np.sqrt(masses @ (lengths - mean) ** 2) == pytest.approx(known.std, rel=1e-6)


def test_no_output_is_longer_than_the_mask_buffer() -> None:
    for trace in (SHAREGPT, ARXIV):
        longest = max(r.output_tokens for r in drawn(trace, count=NUM_REQUESTS))
        assert longest <= trace.mask_buffer_tokens


def test_a_seed_gives_the_same_requests_and_another_one_others() -> None:
    assert drawn(SHAREGPT, 7) == drawn(SHAREGPT, 7)
    assert drawn(SHAREGPT, 7, Sessions()) == drawn(SHAREGPT, 7, Sessions())
    assert drawn(SHAREGPT, 7) != drawn(SHAREGPT, 8)


def test_a_longer_trace_begins_like_a_shorter_one() -> None:
    assert drawn(ARXIV, count=6000)[:100] == drawn(ARXIV, count=100)


def test_successive_requests_of_sessions_resemble_each_other() -> None:
    related = drawn(SHAREGPT, sessions=Sessions(), count=NUM_REQUESTS)
    assert lag_1_correlation([r.prompt_tokens for r in related]) == pytest.approx(0.54, abs=0.05)
    assert lag_1_correlation([r.output_tokens for r in related]) == pytest.approx(0.45, abs=0.05)
    apart = drawn(SHAREGPT, count=NUM_REQUESTS)
    assert abs(lag_1_correlation([r.prompt_tokens for r in apart])) < 0.03


@pytest.mark.parametrize("std", [1.0, 2000.0])
def test_statistics_that_contradict_each_other_are_refused(std: float) -> None:
    with pytest.raises(ConfigurationError, match="no distribution"):
        fitted_masses(LengthStatistics(median=800, p99=2000, std=std, low=1, high=2048))


def test_a_range_that_does_not_hold_the_quantiles_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="low < median"):
        fitted_masses(LengthStatistics(median=800, p99=2000, std=500, low=1, high=1024))


def test_sessions_refuse_what_is_no_correlation() -> None:
    with pytest.raises(ConfigurationError, match="prompt_correlation"):
        Sessions(prompt_correlation=1.0)
    with pytest.raises(ConfigurationError, match="mean_turns"):
        Sessions(mean_turns=0.5)
