"""The tables of the page besides the claims: both systems side by side, and the policies tried.

Decides which numbers are compared at which rate. Called by ``page``.
"""

from collections.abc import Iterator
from dataclasses import fields as dataclass_fields
from statistics import mean

from sangam_loadtest.report.drawn import Table
from sangam_loadtest.reproduction.claims import (
    MEAN_BOUNDS,
    capacities,
    capacity,
    hybrid_curve,
    mode_curve,
    sustained,
)
from sangam_loadtest.reproduction.curves import Curve, sustained_rate
from sangam_loadtest.reproduction.runner import Results
from sangam_loadtest.reproduction.studies import (
    BREAKDOWN_RATES,
    BUDGET_PAIRS,
    BUDGET_THETAS,
    HYBRID,
    MODES,
    OTHER_COMMITS,
    OVERLOAD_RATES,
    PAIRS,
    POLICY_RATES,
    WINNER,
    reference_labels,
    variants,
)
from sangam_loadtest.reproduction.trial import OURS, Trial
from sangam_loadtest.simulator.commits import DEFAULT_COMMITS
from sangam_loadtest.simulator.system import PAPER

_NUMBERS = (
    "prefill_queueing_seconds",
    "decode_queueing_seconds",
    "prefill_seconds",
    "decode_seconds",
    "transfer_seconds",
)


def every_run(results: Results) -> Table:
    """Every trial with all that it fixes, and its numbers."""
    fields = [item.name for item in dataclass_fields(Trial)]
    rows: list[tuple[str | float | None, ...]] = []
    for trial, run in results.items():
        told = [str(getattr(trial, name)) for name in fields]
        numbers = [run.mean(name) for name in _NUMBERS]
        rows.append(
            (
                *told,
                run.records.num_answered,
                run.mean("latency_seconds"),
                run.percentile("latency_seconds", 50),
                run.percentile("latency_seconds", 99),
                sustained_rate(run),
                *numbers,
                run.saturation or "",
            )
        )
    columns = (*fields, "answered", "mean_seconds", "p50_seconds", "p99_seconds")
    columns = (*columns, "answered_per_second", *_NUMBERS)
    return Table((*columns, "saturation"), tuple(rows))


def both_systems(results: Results) -> Table:
    """Highest rate within the mean's bound, by pair and mode: the paper's system and this one."""
    rows: list[tuple[str | float | None, ...]] = []
    for pair in PAIRS:
        found: dict[str, dict[str, float | None]] = {}
        for system, study in ((PAPER, "modes"), (OURS, "ours")):
            found[system] = {
                split: capacity(
                    mode_curve(results, pair, split, study=study, system=system, where=_is_bf16),
                    pair,
                )
                for split in MODES
            }
        best = {system: max(rates.values(), key=_number) for system, rates in found.items()}
        mode = max(found[OURS], key=lambda split: _number(found[OURS][split]))
        paper, ours = best[PAPER], best[OURS]
        rows.append(
            (
                f"{pair[0]}, {pair[1]}",
                MEAN_BOUNDS[pair],
                *(found[PAPER][split] for split in MODES),
                *(found[OURS][split] for split in MODES),
                mode,
                ours / paper if ours and paper else None,
            )
        )
    return Table(
        (
            "model, trace",
            "mean within, s",
            *(f"paper's {split}" for split in MODES),
            *(f"this {split}" for split in MODES),
            "best here",
            "times the paper's best",
        ),
        tuple(rows),
    )


def fp8(results: Results) -> Table:
    """What FP8 adds, against the paper's best mode."""
    rows: list[tuple[str | float | None, ...]] = []
    for pair in PAIRS:
        curve = mode_curve(
            results, pair, HYBRID, study="ours", system=OURS, where=lambda t: not _is_bf16(t)
        )
        if not curve.points:
            continue
        paper = max(capacities(results, pair).values(), key=_number)
        rate = capacity(curve, pair)
        rows.append(
            (
                f"{pair[0]}, {pair[1]}",
                MEAN_BOUNDS[pair],
                rate,
                rate / paper if rate and paper else None,
            )
        )
    return Table(
        ("model, trace", "mean within, s", f"this {HYBRID}, FP8", "times the paper's best"),
        tuple(rows),
    )


def policies(results: Results, pair: tuple[str, str]) -> Table:
    """Mean and P99 of every policy at a pair's rates."""
    rows: list[tuple[str | float | None, ...]] = []
    for trial in variants(*pair):
        points = [beyond_curve(results, pair, trial.label).at(rate) for rate in POLICY_RATES[pair]]
        rows.append((trial.label, *(value for p in points for value in (p.mean, p.p99))))
    columns = [
        f"{rate:g}/s: {statistic}" for rate in POLICY_RATES[pair] for statistic in ("mean", "P99")
    ]
    return Table(("policy", *columns), tuple(rows))


def saturation(results: Results) -> Table:
    """Answers a second of every mode under overload: the paper's system and this one."""
    rows: list[tuple[str | float | None, ...]] = []
    for pair in PAIRS:
        rates = [
            sustained(results, pair, split, system=system)
            for system in (PAPER, OURS)
            for split in MODES
        ]
        rows.append((f"{pair[0]}, {pair[1]}", *rates))
    names = [f"{whose} {split}" for whose in ("paper's", "this") for split in MODES]
    return Table(("model, trace", *names), tuple(rows))


def hybrid_budgets(results: Results, pair: tuple[str, str]) -> Table:
    """P99 of a hybrid with the small and the large budget, by theta and rate."""
    curves = {
        theta: [hybrid_curve(results, pair, tau, theta) for tau in (1024, 4096)]
        for theta in BUDGET_THETAS
    }
    rates = curves[BUDGET_THETAS[0]][0].rates
    rows = [
        (
            f"{theta:g}",
            *(f"{small.at(rate).p99:.1f} / {large.at(rate).p99:.1f}" for rate in rates),
        )
        for theta, (small, large) in curves.items()
    ]
    return Table(("theta, tokens", *(f"{rate:g}/s" for rate in rates)), tuple(rows))


def thresholds(results: Results) -> Table:
    """What theta does, which the paper does not give."""
    found: dict[float, dict[tuple[str, str], tuple[float, float]]] = {}
    for trial, run in results.items():
        if trial.study == "thresholds":
            both = run.mean("latency_seconds"), run.percentile("latency_seconds", 99)
            found.setdefault(trial.theta_tokens, {})[trial.model, trial.trace] = both
    columns = [
        f"{pair[0]}, {pair[1]}, {BREAKDOWN_RATES[pair]:g}/s: {statistic}, s"
        for pair in BUDGET_PAIRS
        for statistic in ("mean", "P99")
    ]
    return Table(
        ("theta, tokens", *columns),
        tuple(
            (f"{theta:g}", *(value for pair in BUDGET_PAIRS for value in by_pair[pair]))
            for theta, by_pair in sorted(found.items())
        ),
    )


def beyond_curve(results: Results, pair: tuple[str, str], label: str) -> Curve:
    """A policy's points."""
    split = next(trial.split for trial in variants(*pair) if trial.label == label)
    return mode_curve(
        results,
        pair,
        split,
        study="beyond",
        system=OURS,
        where=lambda trial: trial.label == label,
    )


def repeated(results: Results) -> Table:
    """The winner against the best of the references at high load, over three sets of requests."""
    rows: list[tuple[str | float | None, ...]] = []
    for pair in PAIRS:
        for rate in POLICY_RATES[pair][1:]:
            found: dict[str, list[tuple[float, float]]] = {}
            for trial, run in results.items():
                if (trial.study, trial.model, trial.trace, trial.rate) == ("repeats", *pair, rate):
                    both = run.mean("latency_seconds"), run.percentile("latency_seconds", 99)
                    found.setdefault(trial.label, []).append(both)
            means = {label: mean(one for one, _ in values) for label, values in found.items()}
            tails = {label: mean(two for _, two in values) for label, values in found.items()}
            best = min(reference_labels(), key=lambda label: means[label])
            rows.append(
                (
                    f"{pair[0]}, {pair[1]}",
                    rate,
                    best,
                    means[best],
                    means[WINNER],
                    tails[best],
                    tails[WINNER],
                    min(tails[label] for label in reference_labels()),
                )
            )
    return Table(
        (
            "model, trace",
            "requests/s",
            "paper's best mode",
            "its mean, s",
            "C's mean, s",
            "its P99, s",
            "C's P99, s",
            "best P99 of any mode, s",
        ),
        tuple(rows),
    )


def other_commits(results: Results) -> Table:
    """The paper's modes with other numbers of tokens a pass: by the mean's bound, and at most."""
    rows: list[tuple[str | float | None, ...]] = []
    for pair in PAIRS:
        own = DEFAULT_COMMITS[pair[0]]
        for commits in sorted((own, *OTHER_COMMITS[pair[0]])):
            rates = [capacity(_curve_with(results, pair, split, commits), pair) for split in MODES]
            most = [_most_with(results, pair, split, commits) for split in MODES]
            mark = " (used)" if commits == own else ""
            rows.append((f"{pair[0]}, {pair[1]}", f"{commits:g}{mark}", *rates, *most))
    names = [f"{split}{what}" for what in (", by the mean", ", at most") for split in MODES]
    return Table(("model, trace", "tokens a pass", *names), tuple(rows))


def _curve_with(results: Results, pair: tuple[str, str], split: str, commits: float) -> Curve:
    if commits == DEFAULT_COMMITS[pair[0]]:
        return mode_curve(results, pair, split)
    return mode_curve(
        results,
        pair,
        split,
        study="other commits",
        where=lambda t: t.commits_per_pass == commits and t.rate < OVERLOAD_RATES[PAPER],
    )


def _most_with(results: Results, pair: tuple[str, str], split: str, commits: float) -> float:
    if commits == DEFAULT_COMMITS[pair[0]]:
        return sustained(results, pair, split, where=lambda t: t.seed == 0)
    return sustained(
        results,
        pair,
        split,
        study="other commits",
        where=lambda t: t.commits_per_pass == commits,
    )


def winners(results: Results, reference: tuple[str, ...]) -> Iterator[tuple[str, int, int]]:
    """For each policy: at how many of the points its mean, and its P99, are below the best of the
    references' at that point."""
    for trial in variants(*PAIRS[0]):
        is_mean = is_tail = 0
        for pair in PAIRS:
            for rate in POLICY_RATES[pair]:
                point = beyond_curve(results, pair, trial.label).at(rate)
                others = [beyond_curve(results, pair, label).at(rate) for label in reference]
                is_mean += point.mean < min(other.mean for other in others)
                is_tail += point.p99 < min(other.p99 for other in others)
        yield trial.label, is_mean, is_tail


def _is_bf16(trial: Trial) -> bool:
    return trial.quantization == "bf16"


def _number(rate: float | None) -> float:
    return rate or 0.0
