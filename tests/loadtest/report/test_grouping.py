"""Runs fall into facets and lines, are called by what differs, and are picked at one rate."""

import pytest
from tests.loadtest.report.records import label, records, run, sweep

from sangam_loadtest.report.grouping import (
    Pair,
    SeriesOf,
    at_one_rate,
    by_pair,
    pooled,
    pooling_notes,
)
from sangam_loadtest.report.runs import Run, run_of


def names(runs: list[Run]) -> list[str]:
    return [series.name for series in SeriesOf(runs).all]


def test_lines_are_called_by_the_configuration_alone_where_nothing_else_differs() -> None:
    runs = [run(name, num=5) for name in ("5P3D", "4P4D", "8C", "5P3C")]
    assert names(runs) == ["8C", "5P3C", "4P4D", "5P3D"]


def test_lines_tell_system_budget_and_kind_where_those_differ() -> None:
    assert names([run("8C", num=5, system="paper"), run("8C", num=5, system="sangam")]) == [
        "8C, paper",
        "8C, sangam",
    ]
    swept = [run("8C", num=5, tau_tokens=tau) for tau in (16384, 512, 2048)]
    assert names(swept) == ["8C, τ = 512", "8C, τ = 2048", "8C, τ = 16384"]
    mixed = [run("8C", num=5, kind="measured"), run("8C", num=5), run("8C", num=5, kind=None)]
    assert names(mixed) == ["8C, measured", "8C, simulated", "8C, unknown kind"]


def test_budgets_that_follow_the_configuration_are_no_sweep() -> None:
    runs = [run("8C", num=5, tau_tokens=1024), run("4P4D", num=5, tau_tokens=2048)]
    assert names(runs) == ["8C", "4P4D"]


def test_what_is_swept_in_one_facet_is_called_by_its_budget_in_all() -> None:
    swept = [run("8C", num=5, tau_tokens=tau) for tau in (1024, 4096)]
    runs = [*swept, run("8C", num=5, trace="arxiv", tau_tokens=1024)]
    assert names(runs) == ["8C, τ = 1024", "8C, τ = 4096"]


def test_facets_are_pairs_of_model_and_trace_in_the_papers_order_then_as_seen() -> None:
    runs = [
        run(num=5, model=None, trace=None),
        run(num=5, model="mine", trace="arxiv"),
        run(num=5, model="dream-7b", trace="arxiv"),
        run(num=5, model="dream-7b"),
        run(num=5),
    ]
    assert [str(pair) for pair in by_pair(runs)] == [
        "LLaDA-8B, ShareGPT",
        "Dream-7B, ShareGPT",
        "Dream-7B, arXiv",
        "unknown model, unknown trace",
        "mine, arXiv",
    ]


def test_repeats_are_pooled_and_that_is_said() -> None:
    first = run_of(label(), records(num_requests=10))
    second = run_of(label(), records(num_requests=30, seed=2))
    other = run("8C", num=5)
    found = pooled([first, other, second])
    assert [each.records.num_counted for each in found] == [40, 5]
    due = found[0].records.columns["scheduled_seconds"].tolist()
    assert due == sorted(due)
    total = first.latency_seconds.sum() + second.latency_seconds.sum()
    assert found[0].latency_seconds.sum() == pytest.approx(total)
    assert pooling_notes([first, other, second])[0].endswith("pooled with it: 1.")
    assert pooling_notes([first, other]) == ()


def test_a_models_ways_of_writing_are_one_facet_and_its_repeats_are_pooled() -> None:
    runs = [run("8C", num=5), run("8C", num=5, model="LLaDA-8B")]
    assert len(by_pair(runs)) == 1
    assert len(pooled(runs)) == 1


def test_one_rate_is_the_one_asked_for_in_each_facet_that_has_it() -> None:
    runs = [*sweep(["8C"], [2, 4], 5), *sweep(["8C"], [3], 5, trace="arxiv")]
    chosen, notes = at_one_rate(runs, [4.0])
    assert [(str(pair), found[0].label.rate) for pair, found in chosen.items()] == [
        ("LLaDA-8B, ShareGPT", 4)
    ]
    assert notes == ("LLaDA-8B, arXiv: no run at the rate asked for; its rates: 3.",)
    chosen, notes = at_one_rate(runs, [4.0, 3.0])
    assert {found[0].label.rate for found in chosen.values()} == {3, 4}
    assert notes == ()


def test_one_rate_is_else_the_highest_that_most_have_and_half_of_them_sustain() -> None:
    runs = [*sweep(["8C", "5P3C", "4P4D"], [2, 6, 30], 200), *sweep(["8C"], [8], 200)]
    assert [each.saturation is None for each in runs if each.label.rate == 6] == [True] * 3
    assert all(each.saturation for each in runs if each.label.rate == 30)
    chosen, _ = at_one_rate(runs)
    found = chosen[Pair("LLaDA-8B", "ShareGPT")]
    assert [(each.label.configuration, each.label.rate) for each in found] == [
        ("8C", 6),
        ("5P3C", 6),
        ("4P4D", 6),
    ]
    assert at_one_rate(sweep(["8C"], [40, 30], 200))[0].popitem()[1][0].label.rate == 30


def test_runs_without_a_rate_are_no_choice() -> None:
    chosen, notes = at_one_rate([run_of(label(rate=None), records(num_requests=5))])
    assert chosen == {}
    assert "none that is known" in notes[0]
