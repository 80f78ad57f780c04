"""The paper's claims, each held against the simulation: what it says, what came out, a verdict.

Decides how a claim is measured; never what the numbers are. A claim that does not hold is told like
one that does. Called by ``page``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import mean

from sangam_loadtest.reproduction.curves import Curve, curve_of, sustained_rate
from sangam_loadtest.reproduction.runner import Results
from sangam_loadtest.reproduction.studies import (
    ARXIV,
    BUDGET_PAIRS,
    BUDGET_THETAS,
    COLOCATED,
    DISAGGREGATED,
    DREAM,
    HYBRID,
    LLADA,
    MODES,
    OVERLOAD_RATES,
    PAIRS,
    SHAREGPT,
)
from sangam_loadtest.reproduction.trial import Trial
from sangam_loadtest.simulator.system import PAPER

MEAN_BOUNDS = {
    (LLADA, SHAREGPT): 7.0,
    (LLADA, ARXIV): 4.0,
    (DREAM, SHAREGPT): 7.0,
    (DREAM, ARXIV): 4.0,
}
"""Seconds of mean latency at which capacities are compared, by model and trace."""
_ABOUT_THREE = (2.5, 3.5)
HOLDS, FAILS, PARTLY = "holds", "does not hold", "partly"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table.

    Attributes:
        paper: what the paper has, as far as it is known here. ours: what the simulation gave.
    """

    section: str
    claim: str
    paper: str
    ours: str
    verdict: str


def findings(results: Results) -> list[Finding]:
    """Every claim's row."""
    return [row for claim in _CLAIMS for row in claim(results)]


def mode_curve(
    results: Results,
    pair: tuple[str, str],
    split: str,
    *,
    study: str = "modes",
    system: str = PAPER,
    where: Callable[[Trial], bool] = lambda trial: True,
) -> Curve:
    """Latency against rate of one deployment of a study."""
    return curve_of(
        results,
        lambda t: (
            t.study == study
            and (t.model, t.trace) == pair
            and t.split == split
            and t.system == system
            and where(t)
        ),
    )


def capacity(curve: Curve, pair: tuple[str, str]) -> float | None:
    """Rate at which the mean reaches the pair's bound."""
    return curve.rate_within(MEAN_BOUNDS[pair])


def capacities(results: Results, pair: tuple[str, str]) -> dict[str, float | None]:
    """The same of each of the paper's modes."""
    return {split: capacity(mode_curve(results, pair, split), pair) for split in MODES}


def told(rate: float | None) -> str:
    """A rate in words."""
    return "below the lowest rate" if rate is None else f"{rate:.1f}"


def _disaggregated_saturates_first(results: Results) -> Iterator[Finding]:
    yield first_by_saturation(results)
    texts, is_first = [], []
    for pair in PAIRS:
        rates = capacities(results, pair)
        lowest = min(rates, key=lambda split: rates[split] or 0.0)
        is_first.append(lowest == DISAGGREGATED)
        listed = ", ".join(f"{split} {told(rate)}" for split, rate in rates.items())
        texts.append(f"{pair[0]} {pair[1]}: {listed}")
    yield Finding(
        "6.2",
        "The same, by the rate at which the mean latency reaches a bound",
        "all four",
        "requests/s within the mean's bound: " + "; ".join(texts),
        HOLDS if all(is_first) else f"{PARTLY}: {sum(is_first)} of 4",
    )


def first_by_saturation(results: Results) -> Finding:
    """By the most that a mode answers a second, more arriving than any can take."""
    texts, is_first = [], []
    for pair in PAIRS:
        rates = {split: sustained(results, pair, split) for split in MODES}
        others = [rate for split, rate in rates.items() if split != DISAGGREGATED]
        is_first.append(rates[DISAGGREGATED] < min(others))
        listed = ", ".join(f"{split} {rate:.1f}" for split, rate in rates.items())
        texts.append(f"{pair[0]} {pair[1]}: {listed}")
    return Finding(
        "6.2",
        "Static disaggregation (5P3D) saturates first in all four pairs",
        "all four",
        "answers/s under overload, mean of three sets of requests: " + "; ".join(texts),
        HOLDS if all(is_first) else f"{PARTLY}: {sum(is_first)} of 4",
    )


def sustained(
    results: Results,
    pair: tuple[str, str],
    split: str,
    *,
    study: str = "saturation",
    system: str = PAPER,
    where: Callable[[Trial], bool] = lambda trial: True,
) -> float:
    """Answers a second of an overloaded mode, mean over the sets of requests."""
    wanted = (study, *pair, split, system, OVERLOAD_RATES[system])
    return mean(
        sustained_rate(run)
        for t, run in results.items()
        if (t.study, t.model, t.trace, t.split, t.system, t.rate) == wanted and where(t)
    )


def _best_mode(
    results: Results, pair: tuple[str, str], expected: str, name: str
) -> Iterator[Finding]:
    rates = capacities(results, pair)
    best = max(rates, key=lambda split: rates[split] or 0.0)
    listed = ", ".join(f"{split} {told(rate)}" for split, rate in rates.items())
    yield Finding(
        "6.2",
        f"{name} serves {pair[0]} on {pair[1]} best",
        f"{expected} best",
        f"requests/s at a mean of {MEAN_BOUNDS[pair]:g} s: {listed}",
        HOLDS if best == expected else f"{FAILS}: {best} is",
    )


def _ratios(results: Results) -> Iterator[Finding]:
    pair = (LLADA, SHAREGPT)
    curves = {split: mode_curve(results, pair, split, study="ratios") for split in ("4P4D", "6P2D")}
    rate = curves["4P4D"].rates[-1]
    for split, part, other in (
        ("4P4D", "prefill", "decode"),
        ("6P2D", "decode", "prefill"),
    ):
        point = curves[split].at(rate)
        queues = {"prefill": point.prefill_queueing, "decode": point.decode_queueing}
        yield Finding(
            "3.3",
            f"{split} queues at {'prefill' if part == 'prefill' else 'decode memory'}",
            f"{part} queueing dominates",
            f"at {rate:g} requests/s a request waits {queues['prefill']:.2f} s for prefills, "
            f"{queues['decode']:.2f} s for decode workers",
            HOLDS if queues[part] > 2 * queues[other] else FAILS,
        )


def _small_budget_collapses(results: Results) -> Iterator[Finding]:
    pair = (LLADA, SHAREGPT)
    curves = {tau: _tau_curve(results, pair, tau) for tau in (512, 1024, 4096, 16384)}
    rates = {tau: capacity(curve, pair) for tau, curve in curves.items()}
    listed = ", ".join(f"{tau}: {told(rate)}" for tau, rate in rates.items())
    lowest = min(rates, key=lambda tau: rates[tau] or 0.0)
    yield Finding(
        "6.3",
        "tau = 512 collapses first",
        "512 first",
        f"requests/s at a mean of {MEAN_BOUNDS[pair]:g} s by tau: {listed}",
        HOLDS if lowest == 512 else f"{FAILS}: {lowest} does",
    )


def _tau_curve(results: Results, pair: tuple[str, str], tau: int) -> Curve:
    return mode_curve(
        results, pair, COLOCATED, study="colocated budgets", where=lambda t: t.tau_tokens == tau
    )


def _deficit_against_prefill_first(results: Results) -> Iterator[Finding]:
    pair = (LLADA, SHAREGPT)
    small, large = (_tau_curve(results, pair, tau) for tau in (1024, 16384))
    wins_tail = [rate for rate in small.rates if small.at(rate).p99 < large.at(rate).p99]
    loses_mean = [rate for rate in small.rates if small.at(rate).mean > large.at(rate).mean]
    both = [rate for rate in wins_tail if rate in loses_mean]
    listed = "; ".join(
        f"{rate:g}/s: P99 {small.at(rate).p99:.1f} against {large.at(rate).p99:.1f} s, mean "
        f"{small.at(rate).mean:.2f} against {large.at(rate).mean:.2f} s"
        for rate in small.rates[-3:]
    )
    yield Finding(
        "6.3",
        "tau = 1024 beats 16384 at P99 on ShareGPT while losing on the mean",
        "better P99, worse mean",
        listed,
        f"{HOLDS} at {', '.join(f'{rate:g}' for rate in both)}/s, not below" if both else FAILS,
    )


def _hybrid_budget(results: Results) -> Iterator[Finding]:
    """At each theta, since the paper's is not known: how often a prefill overflows, and so how much
    the budget has to protect, hangs on it."""
    for pair in BUDGET_PAIRS:
        texts, is_better, always = [], [], []
        for theta in BUDGET_THETAS:
            small, large = (hybrid_curve(results, pair, tau, theta) for tau in (1024, 4096))
            wins = [rate for rate in small.rates if small.at(rate).p99 < large.at(rate).p99]
            top = small.rates[-1]
            is_better.append(top in wins)
            always += [f"{theta:g}"] * (len(wins) == len(small.rates))
            told_rates = "/s, ".join(f"{rate:g}" for rate in wins)
            texts.append(
                f"theta {theta:g}: at {len(wins)} of {len(small.rates)} rates"
                + (f" ({told_rates}/s)" if wins else "")
                + f", at {top:g}/s {small.at(top).p99:.1f} against {large.at(top).p99:.1f} s"
            )
        yield Finding(
            "6.4",
            f"Hybrid: tau = 1024 beats 4096 at P99 ({pair[0]}, {pair[1]})",
            "better P99",
            "; ".join(texts),
            f"{HOLDS} at the highest load at every theta; at all rates at theta "
            + (" and ".join(always) or "none")
            if all(is_better)
            else PARTLY,
        )


def hybrid_curve(results: Results, pair: tuple[str, str], tau: int, theta: float) -> Curve:
    """A hybrid's latency against rate at a tau of its colocated workers and a theta."""
    return mode_curve(
        results,
        pair,
        HYBRID,
        study="hybrid budgets",
        where=lambda t: (t.tau_tokens, t.theta_tokens) == (tau, theta),
    )


def _batching(results: Results) -> Iterator[Finding]:
    for pair in ((LLADA, SHAREGPT), (DREAM, ARXIV)):
        best = max(rate or 0.0 for rate in capacities(results, pair).values())
        texts, factors = [], []
        for system, name in ((PAPER, "the same engine"), ("fast-dllm", "the Fast-dLLM loop")):
            one = mode_curve(
                results, pair, COLOCATED, study="batch one", system=system
            ).rate_within(MEAN_BOUNDS[pair])
            if one is None:
                texts.append(f"{name} at batch 1 is over the bound at any rate")
                continue
            factors.append(best / one)
            texts.append(f"{best / one:.1f}x {name} at batch 1 ({one:.1f})")
        yield Finding(
            "6.5",
            f"About 3x the rate of batch-1 serving ({pair[0]}, {pair[1]})",
            "about 3x",
            f"{best:.1f} requests/s at a mean of {MEAN_BOUNDS[pair]:g} s: " + ", ".join(texts),
            about_three(factors),
        )


def about_three(factors: list[float]) -> str:
    """The paper's batch-1 server is not known: the same engine and the public loop bound it."""
    low, high = _ABOUT_THREE
    if factors and low <= factors[0] <= high:
        return f"{HOLDS} against the same engine"
    if factors and min(factors) < low and max(factors) > high:
        return f"{PARTLY}: between the two"
    return FAILS


_CLAIMS: tuple[Callable[[Results], Iterator[Finding]], ...] = (
    _ratios,
    _disaggregated_saturates_first,
    partial(_best_mode, pair=(LLADA, SHAREGPT), expected=COLOCATED, name="Colocated serving"),
    partial(_best_mode, pair=(DREAM, ARXIV), expected=HYBRID, name="The hybrid"),
    _small_budget_collapses,
    _deficit_against_prefill_first,
    _hybrid_budget,
    _batching,
)
