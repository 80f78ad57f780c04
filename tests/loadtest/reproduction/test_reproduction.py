"""The evaluation's arithmetic and page, on runs whose numbers are made up: no simulation here."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sangam_loadtest.records import RequestRecord
from sangam_loadtest.report.runs import run_of
from sangam_loadtest.reproduction.claims import (
    FAILS,
    HOLDS,
    PARTLY,
    about_three,
    findings,
    first_by_saturation,
    mode_curve,
)
from sangam_loadtest.reproduction.curves import Curve, CurvePoint, sustained_rate
from sangam_loadtest.reproduction.page import write_page
from sangam_loadtest.reproduction.runner import Results, run_trials
from sangam_loadtest.reproduction.studies import (
    COLOCATED,
    DISAGGREGATED,
    LLADA,
    PAIRS,
    SHAREGPT,
    every_trial,
    reference_labels,
    saturation,
)
from sangam_loadtest.reproduction.tables import winners
from sangam_loadtest.reproduction.trial import OURS, Trial


def a_trial(**changes: object) -> Trial:
    base = Trial("modes", LLADA, SHAREGPT, COLOCATED, 4.0, num_requests=12)
    return replace(base, **changes)  # type: ignore[arg-type]


def a_curve(*points: tuple[float, float]) -> Curve:
    return Curve(tuple(CurvePoint(rate, mean, 2 * mean, 0.0, 0.0) for rate, mean in points))


def made_up(seconds: Callable[[Trial], float]) -> Results:
    """Every trial with requests whose latencies are ``seconds`` and, one in ten, thrice that."""

    def record(index: int, trial: Trial) -> RequestRecord:
        latency = seconds(trial) * (3 if index % 10 == 0 else 1)
        return RequestRecord(
            index=index,
            scheduled_seconds=index / trial.rate,
            sent_seconds=index / trial.rate,
            prompt_tokens=100,
            output_tokens=50 + index,
            latency_seconds=latency,
            queueing_seconds=latency / 2,
            prefill_queueing_seconds=latency / 4,
            decode_queueing_seconds=latency / 4,
            prefill_seconds=latency / 8,
            decode_seconds=latency / 4,
            transfer_seconds=latency / 8,
            num_steps=30 + index,
            num_retries=0,
        )

    return {
        trial: run_of(trial.run_label, [record(index, trial) for index in range(20)])
        for trial in every_trial()
    }


def by_rate(trial: Trial) -> float:
    return 0.3 * trial.rate


def test_the_rate_within_a_bound_lies_on_the_line_between_two_points() -> None:
    curve = a_curve((4, 1.0), (6, 3.0), (8, 9.0))
    assert curve.rate_within(2.0) == pytest.approx(5.0)
    assert curve.rate_within(6.0) == pytest.approx(7.0)
    assert curve.rate_within(6.0, "p99") == pytest.approx(6.0)


def test_a_bound_beyond_the_points_gives_an_end_or_nothing() -> None:
    curve = a_curve((4, 1.0), (6, 3.0))
    assert curve.rate_within(50.0) == 6
    assert curve.rate_within(0.5) is None


def test_trials_differ_in_their_files_and_studies_share_them() -> None:
    trial = a_trial()
    others = [
        replace(trial, rate=5.0),
        replace(trial, system=OURS),
        replace(trial, tau_tokens=512),
        replace(trial, max_blocks_per_decoder=40),
        replace(trial, seed=1),
    ]
    folder = Path("records")
    assert len({t.path(folder) for t in [trial, *others]}) == 6
    assert replace(trial, study="ratios", label="x").path(folder) == trial.path(folder)


def test_a_trial_is_run_once_and_then_read(tmp_path: Path) -> None:
    trial = a_trial()
    console = Console(quiet=True)
    first = run_trials([trial, trial], tmp_path, console)
    path = trial.path(tmp_path)
    assert first[trial].records.num_answered == 12
    # What is read the second time is the file: cut it, and the run is cut.
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:7]))
    assert run_trials([trial], tmp_path, console)[trial].records.num_answered == 7


def test_a_claim_is_told_as_holding_or_not_by_the_numbers() -> None:
    def disaggregated_is_slow(trial: Trial) -> float:
        return by_rate(trial) * (5 if trial.split == DISAGGREGATED else 1)

    def verdict(results: Results) -> str:
        return next(f.verdict for f in findings(results) if f.claim.startswith("The same, by"))

    assert verdict(made_up(disaggregated_is_slow)) == HOLDS

    def colocated_is_slow(trial: Trial) -> float:
        return by_rate(trial) * (5 if trial.split == COLOCATED else 1)

    slow = made_up(colocated_is_slow)
    assert verdict(slow) != HOLDS
    best = next(f for f in findings(slow) if f.claim.startswith("Colocated serving serves"))
    assert best.verdict.startswith(FAILS)


def answered_evenly(per_second: float, trial: Trial) -> list[RequestRecord]:
    """Requests that end one after the other, however fast they come."""
    return [
        RequestRecord(
            index=index,
            scheduled_seconds=index / trial.rate,
            sent_seconds=index / trial.rate,
            prompt_tokens=1,
            output_tokens=1,
            latency_seconds=(index + 1) / per_second - index / trial.rate,
        )
        for index in range(100)
    ]


def test_what_a_mode_can_take_is_what_it_answers_under_overload() -> None:
    trial = a_trial(rate=14.0)
    run = run_of(trial.run_label, answered_evenly(5.0, trial))
    assert sustained_rate(run) == pytest.approx(5.0, rel=0.02)


@pytest.mark.parametrize(
    ("slowest", "verdict"), [(DISAGGREGATED, HOLDS), (COLOCATED, "partly: 0 of 4")]
)
def test_the_mode_that_answers_least_under_overload_saturates_first(
    slowest: str, verdict: str
) -> None:
    results = {
        trial: run_of(
            trial.run_label, answered_evenly(7.0 if trial.split == slowest else 8.0, trial)
        )
        for trial in saturation()
    }
    found = first_by_saturation(results)
    assert found.verdict == verdict
    assert f"{slowest} 7." in found.ours


def test_a_hybrids_budget_is_judged_at_each_theta() -> None:
    def small_is_better(trial: Trial) -> float:
        is_small = trial.study == "hybrid budgets" and trial.tau_tokens == 1024
        return by_rate(trial) * (0.5 if is_small else 1)

    def verdicts(seconds: Callable[[Trial], float]) -> set[str]:
        rows = findings(made_up(seconds))
        return {row.verdict for row in rows if row.claim.startswith("Hybrid: tau = 1024")}

    assert verdicts(small_is_better) == {
        f"{HOLDS} at the highest load at every theta; at all rates at theta 2048 and 4096 and 8192"
    }

    def small_is_worse_at_the_top(trial: Trial) -> float:
        is_top = trial.tau_tokens == 1024 and trial.rate in (10, 11)
        return by_rate(trial) * (2 if is_top and trial.study == "hybrid budgets" else 1)

    assert verdicts(small_is_worse_at_the_top) == {PARTLY}


def test_a_policy_wins_only_where_it_beats_every_reference() -> None:
    label = "5P3C, adaptive tau"

    def one_is_fast(trial: Trial) -> float:
        return by_rate(trial) * (0.5 if trial.label == label else 1)

    found = {name: counts for name, *counts in winners(made_up(one_is_fast), reference_labels())}
    assert found[label] == [12, 12]
    assert found[f"{COLOCATED}, decode-aware"] == [0, 0]


def test_the_page_holds_every_claim_and_a_picture_for_every_section(tmp_path: Path) -> None:
    results = made_up(by_rate)
    write_page(results, tmp_path)
    page = (tmp_path / "README.md").read_text()
    for finding in findings(results):
        assert finding.claim in page
    images = sorted(path.name for path in tmp_path.glob("*.png"))
    assert len(images) == 9
    assert all(f"]({name})" in page for name in images)
    files = {path.name for path in tmp_path.glob("*.csv")}
    assert files == {"runs.csv", "ratios-cdf.csv", "decode-time.csv", "iterations.csv"}
    assert all(name in page for name in files)


def test_every_pair_has_a_curve_of_each_mode() -> None:
    results = made_up(by_rate)
    for pair in PAIRS:
        for study, system in (("modes", "paper"), ("ours", OURS)):
            curve = mode_curve(
                results,
                pair,
                COLOCATED,
                study=study,
                system=system,
                where=lambda t: t.quantization == "bf16",
            )
            assert len(curve.points) >= 6


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ([3.1, 14.0], f"{HOLDS} against the same engine"),
        ([2.3, 6.6], f"{PARTLY}: between the two"),
        ([2.3], FAILS),
        ([6.6, 9.0], FAILS),
        ([], FAILS),
    ],
)
def test_three_times_batch_one_is_held_against_both_baselines(
    factors: list[float], verdict: str
) -> None:
    assert about_three(factors) == verdict
