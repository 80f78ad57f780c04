"""The search finds what a full comparison finds, in any number of processes."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.loadtest.recommend.builders import candidate, scenario, trial

from sangam_loadtest.capacity import Objective
from sangam_loadtest.recommend.candidates import Candidate, Choices, Mode
from sangam_loadtest.recommend.halving import lasts
from sangam_loadtest.recommend.more_gpus import by_proportion, fewest_gpus, scaled
from sangam_loadtest.recommend.search import (
    DeploymentSearch,
    Effort,
    Finalist,
    Stage,
    best_of_modes,
)
from sangam_loadtest.recommend.trials import Scenario, Trial
from sangam_loadtest.recommend.workers import SimulationProcesses
from sangam_loadtest.traces.csv_file import Columns
from sangam_loadtest.traces.request import TraceError

OBJECTIVES = (Objective("latency", "mean", 3.5), Objective("latency", "p99", 9.0))
COLUMNS = Columns("prompt", "output")
SMALL = Choices(
    ("2C", "1P1C", "1P1D"),
    colocated_taus=(1024, 4096),
    hybrid_taus=(1024,),
    prefill_taus=(8192,),
    thetas=(8192.0, math.inf),
    placements=("hybrid",),
)
EFFORT = Effort(40, num_splits=1, num_finalists=1, tolerance=0.2, lower_rates=(0.5,))


def searched(
    asked: Scenario, choices: Choices = SMALL, effort: Effort = EFFORT, num_jobs: int = 1
) -> tuple[list[Finalist], DeploymentSearch, list[Stage]]:
    stages: list[Stage] = []
    with SimulationProcesses(asked, num_jobs) as processes:
        search = DeploymentSearch(processes, choices, effort, stages.append)
        return search.run(), search, stages


@pytest.fixture(scope="module")
def found() -> tuple[list[Finalist], DeploymentSearch, list[Stage]]:
    return searched(scenario(2.5, objectives=OBJECTIVES))


def test_every_mode_has_a_finalist_and_the_first_takes_most(
    found: tuple[list[Finalist], DeploymentSearch, list[Stage]],
) -> None:
    finalists, _, _ = found
    assert {f.candidate.mode for f in finalists} == set(Mode)
    held = [f.capacity.highest_held or 0 for f in finalists]
    assert held == sorted(held, reverse=True)
    assert best_of_modes(finalists)[0] is finalists[0]


def test_the_margin_is_what_simulations_at_these_rates_say(
    found: tuple[list[Finalist], DeploymentSearch, list[Stage]],
) -> None:
    best = found[0][0]
    held, violated = best.capacity.highest_held, best.capacity.lowest_violated
    assert held is not None
    assert violated is not None
    assert best.holds
    assert best.margin == pytest.approx(held / 2.5 - 1)
    assert held < violated <= held * 1.2
    again = scenario(2.5, objectives=OBJECTIVES)
    made = {trial.job.rate: trial for trial in best.curve}
    assert again.run(made[held].job) == made[held]
    assert made[held].holds(OBJECTIVES)
    assert lasts(made[held])
    assert not made[violated].holds(OBJECTIVES)


def test_finalists_are_judged_by_full_runs_at_the_rate_asked_for(
    found: tuple[list[Finalist], DeploymentSearch, list[Stage]],
) -> None:
    for finalist in found[0]:
        job = finalist.trial.job
        assert (job.rate, job.num_requests) == (2.5, 40)
        assert len(finalist.trial.records) == 40
        rates = [t.job.rate for t in finalist.curve]
        assert rates == sorted(rates)
        assert {1.25, 2.5, finalist.capacity.highest_held} <= set(rates)


def test_short_runs_come_first_and_every_stage_is_told(
    found: tuple[list[Finalist], DeploymentSearch, list[Stage]],
) -> None:
    _, search, stages = found
    assert [stage.title.split(":")[0] for stage in stages[:2]] == ["splits", "splits"]
    assert stages[0].num_trials == 3
    assert "30 requests at 2.5/s" in stages[0].title
    assert search.best_so_far() is not None


def test_processes_change_nothing(
    found: tuple[list[Finalist], DeploymentSearch, list[Stage]],
) -> None:
    parallel, _, _ = searched(scenario(2.5, objectives=OBJECTIVES), num_jobs=2)
    assert parallel == found[0]


def test_where_nothing_holds_the_nearest_is_told_with_what_it_can_take() -> None:
    finalists, _, _ = searched(
        scenario(6.0, objectives=OBJECTIVES), Choices(("1C",), colocated_taus=(1024,))
    )
    (only,) = finalists
    assert not only.holds
    assert only.margin is not None
    assert only.margin < 0


def test_objectives_below_what_a_request_takes_alone_have_no_margin() -> None:
    impossible = scenario(2.0, objectives=(Objective("latency", "mean", 0.01),))
    finalists, _, _ = searched(impossible, Choices(("1C",), colocated_taus=(1024,)))
    assert finalists[0].margin is None
    assert not finalists[0].holds


def test_a_trace_that_is_too_short_is_refused_before_anything_runs(tmp_path: Path) -> None:
    trace = tmp_path / "short.csv"
    trace.write_text("prompt,output\n" + "100,64\n" * 10)
    asked = scenario(trace=str(trace))
    asked.load = replace(asked.load, trace=replace(asked.load.trace, columns=COLUMNS))
    with pytest.raises(TraceError, match="10 requests pass the filter, 40 are wanted"):
        searched(asked)


def test_more_gpus_are_found_by_bisection() -> None:
    asked: list[set[int]] = []

    def holding(candidates: Sequence[Candidate]) -> Trial | None:
        asked.append({c.num_gpus for c in candidates})
        able = [c for c in candidates if c.num_gpus >= 11]
        return trial(3.0, able[0]) if able else None

    found = fewest_gpus([candidate("8C"), candidate("5P3C")], 8, 16, holding)
    assert found is not None
    assert found.candidate.num_gpus == 11
    assert asked == [{16}, {12}, {10}, {11}]
    assert fewest_gpus([candidate("8C")], 8, 10, holding) is None


def test_a_candidate_keeps_its_shares_of_roles_on_more_gpus() -> None:
    assert [c.split for c in scaled(candidate("5P3C"), 12)] == ["7P5C", "8P4C"]
    assert [c.split for c in scaled(candidate("5P3D"), 16)] == ["10P6D"]
    assert [c.split for c in scaled(candidate("8C", tau=512), 9)] == ["9C"]
    assert by_proportion(8, 10.0, 7.5) == 11
