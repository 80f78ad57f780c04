"""A run is called saturated when its latency keeps growing or its requests fail, and only then."""

import pytest
from tests.loadtest.report.records import label, run

from sangam_loadtest.records import RequestRecord
from sangam_loadtest.report.runs import Run, run_of


def run_with(latencies: list[float | None], gap_seconds: float = 1.0) -> Run:
    return run_of(
        label(),
        [
            RequestRecord(
                n,
                n * gap_seconds,
                n * gap_seconds,
                10,
                20,
                latency_seconds=latency,
                error=None if latency is not None else "timeout",
            )
            for n, latency in enumerate(latencies)
        ],
    )


def test_a_queue_that_grows_with_every_arrival_is_saturated() -> None:
    grown = run_with([2 + 0.1 * n for n in range(90)])
    assert grown.saturation == ("the mean latency grows from 3.45 s (first third) to 9.45 s (last)")
    assert run("4P4D", 20.0).saturation is not None


@pytest.mark.parametrize(
    "latencies",
    [
        [2.0] * 90,
        [2.0, 9.0] * 45,
        [9 - 0.1 * n for n in range(90)],  # a backlog that is worked off
        [2 + 0.01 * n for n in range(90)],  # slower than 2 % of the arrivals
        [100 + 0.1 * n for n in range(90)],  # a trend within the noise of long requests
        [2 + 0.1 * n for n in range(20)],  # too few to tell
        [2.0],
    ],
)
def test_a_run_that_keeps_up_is_not(latencies: list[float | None]) -> None:
    assert run_with(latencies).saturation is None


def test_failures_over_one_percent_are_told_as_saturation() -> None:
    assert run_with([1.0] * 198 + [None] * 3).saturation == "3 of 201 requests failed"
    assert run_with([1.0] * 199 + [None]).saturation is None
    assert run_with([None, None]).saturation == "2 of 2 requests failed"
