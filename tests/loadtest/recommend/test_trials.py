"""A trial is a function of its job; its slack is that of the worst objective."""

import math
from dataclasses import replace

import pytest
from tests.loadtest.recommend.builders import LATENCY, candidate, scenario, trial

from sangam_core.errors import ConfigurationError
from sangam_loadtest.capacity import Objective
from sangam_loadtest.recommend.trials import Job
from sangam_loadtest.traces.length_filter import LengthFilter


def test_the_worst_objective_decides_the_slack() -> None:
    objectives = (LATENCY, Objective("latency", "p99", 4.0))
    assert trial(3.0).slack(objectives) == pytest.approx(0.25)
    assert trial(8.0).slack(objectives) == pytest.approx(-1.0)
    assert trial(3.0).holds(objectives)
    assert not trial(8.0).holds(objectives)


def test_a_growing_queue_holds_nothing() -> None:
    assert not trial(3.0, growth="the mean latency grows").holds((LATENCY,))


def test_a_metric_that_no_request_has_leaves_no_slack() -> None:
    assert trial().slack((Objective("transfer", "mean", 1.0),)) == -math.inf


def test_the_same_job_gives_the_same_trial() -> None:
    job = Job(candidate("1P1C"), 2.5, 30)
    first, second = scenario().run(job), scenario().run(job)
    assert first == second
    assert set(first.busy_shares) == {"P", "C"}
    assert first.summary.num_requests == 30
    assert first.records == ()
    assert len(scenario().run(replace(job, keeps_records=True)).records) == 30


def test_a_shorter_run_has_the_first_requests_of_a_longer_one() -> None:
    shared = scenario()
    longer, shorter = shared.plan(2.5, 50), shared.plan(2.5, 20)
    assert longer[:20] == shorter
    assert scenario().plan(2.5, 20) == shorter


def test_a_queue_that_grows_is_told_and_one_that_does_not_is_not() -> None:
    shared = scenario()
    overloaded = shared.run(Job(candidate("1C"), 20.0, 300))
    assert overloaded.growth is not None
    assert shared.run(Job(candidate("1C"), 0.5, 300)).growth is None
    assert shared.run(Job(candidate("1C"), 20.0, 100)).growth is None


def test_a_request_that_never_fits_is_refused() -> None:
    large = scenario()
    large.load = replace(
        large.load, trace=replace(large.load.trace, lengths=LengthFilter(min_prompt=1000))
    )
    large.total_pages = 10
    with pytest.raises(ConfigurationError, match="pages"):
        large.run(Job(candidate("1C"), 1.0, 10))
