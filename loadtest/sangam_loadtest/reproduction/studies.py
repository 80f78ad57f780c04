"""Which trials make up each part of the evaluation.

Decides models, traces, splits, rates and budgets; ``claims`` says what is held against them. Rates
run from light load to beyond saturation of the best mode.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from sangam_core.admission import ADAPTIVE
from sangam_core.placements import DECODE_AWARE, SHORTEST_DELAY
from sangam_loadtest.reproduction.trial import OURS, Trial
from sangam_loadtest.simulator.system import PAPER

LLADA, DREAM = "llada-8b", "dream-7b"
SHAREGPT, ARXIV = "sharegpt", "arxiv"
PAIRS = ((LLADA, SHAREGPT), (LLADA, ARXIV), (DREAM, SHAREGPT), (DREAM, ARXIV))
COLOCATED, DISAGGREGATED, HYBRID = "8C", "5P3D", "5P3C"
MODES = (COLOCATED, DISAGGREGATED, HYBRID)

_PAPER_RATES: dict[tuple[str, str], tuple[float, ...]] = {
    (LLADA, SHAREGPT): (5, 6, 7, 7.5, 8, 9, 10),
    (LLADA, ARXIV): (4, 5, 6, 7, 8, 9, 10),
    (DREAM, SHAREGPT): (5, 6, 7, 8, 9, 10, 11),
    (DREAM, ARXIV): (5, 6, 7, 8, 9, 10, 11),
}
_OUR_RATES: dict[tuple[str, str], tuple[float, ...]] = {
    (LLADA, SHAREGPT): (6, 8, 9, 10, 11, 12),
    (LLADA, ARXIV): (6, 8, 10, 11, 12, 13),
    (DREAM, SHAREGPT): (7, 9, 10, 11, 12, 13, 14),
    (DREAM, ARXIV): (7, 9, 11, 12, 13, 14),
}
_FP8_RATES: dict[tuple[str, str], tuple[float, ...]] = {
    (LLADA, SHAREGPT): (10, 12, 14, 16, 18),
    (DREAM, ARXIV): (15, 17, 19, 21, 23),
}


BREAKDOWN_RATES = {
    (LLADA, SHAREGPT): 8,
    (LLADA, ARXIV): 8,
    (DREAM, SHAREGPT): 9,
    (DREAM, ARXIV): 9,
}
"""Where latencies are taken apart: near saturation of the weaker modes."""
OVERLOAD_RATES = {PAPER: 14, OURS: 22}
"""Requests a second that no mode of a system can keep up with."""
SEEDS = (0, 1, 2)
"""Sets of requests, where one could mislead."""
BUDGET_PAIRS = ((LLADA, SHAREGPT), (DREAM, ARXIV))
BUDGET_THETAS = (2048, 4096, 8192)
RATIO_RATE = 7
"""Where the queues of ratios of prefill to decode workers are compared."""


def modes() -> Iterator[Trial]:
    """Sections 6.2: the three modes, four pairs, rising rates."""
    for (model, trace), rates in _PAPER_RATES.items():
        for split in MODES:
            for rate in rates:
                yield Trial("modes", model, trace, split, rate)


def ratios() -> Iterator[Trial]:
    """Section 3.3: prefill workers to decode workers, static disaggregation."""
    for split in ("4P4D", "5P3D", "6P2D"):
        for rate in (4, 5, 6, 7):
            yield Trial("ratios", LLADA, SHAREGPT, split, rate)


def colocated_budgets() -> Iterator[Trial]:
    """Section 6.3: tau of colocated workers."""
    for tau in (512, 1024, 4096, 16384):
        for rate in _PAPER_RATES[LLADA, SHAREGPT][1:]:
            yield Trial("colocated budgets", LLADA, SHAREGPT, COLOCATED, rate, tau_tokens=tau)


def saturation() -> Iterator[Trial]:
    """Section 6.2: more than any mode can take, so that what it answers a second is all it can."""
    for system, rate in OVERLOAD_RATES.items():
        for model, trace in PAIRS:
            for split in MODES:
                for seed in SEEDS:
                    yield Trial("saturation", model, trace, split, rate, system=system, seed=seed)


def hybrid_budgets() -> Iterator[Trial]:
    """Section 6.4: tau of a hybrid's colocated workers, at thetas that the paper may have had."""
    for model, trace in BUDGET_PAIRS:
        for theta in BUDGET_THETAS:
            for tau in (1024, 4096):
                for rate in _PAPER_RATES[model, trace][2:]:
                    yield Trial(
                        "hybrid budgets", model, trace, HYBRID, rate,
                        tau_tokens=tau, theta_tokens=theta, label=f"{HYBRID}, theta {theta}",
                    )  # fmt: skip


def thresholds() -> Iterator[Trial]:
    """How much theta matters, which the paper does not give."""
    for model, trace in BUDGET_PAIRS:
        for theta in (2048, 4096, 8192, 16384, math.inf):
            rate = BREAKDOWN_RATES[model, trace]
            yield Trial("thresholds", model, trace, HYBRID, rate, theta_tokens=theta)


def batch_one() -> Iterator[Trial]:
    """Section 6.5: one request at a time on each worker, against batches."""
    known: dict[tuple[str, str], tuple[float, ...]] = {
        (LLADA, SHAREGPT): (0.5, 1, 2, 2.5, 3, 3.5),
        (DREAM, ARXIV): (1, 2, 3, 4, 5, 6),
    }
    for (model, trace), rates in known.items():
        for rate in rates:
            trial = Trial("batch one", model, trace, COLOCATED, rate, is_batch_one=True)
            yield replace(trial, label="batch 1")
            yield replace(trial, label="Fast-dLLM, batch 1", system="fast-dllm", rate=rate / 2)


def ours() -> Iterator[Trial]:
    """This system's costs, the paper's policies."""
    for (model, trace), rates in _OUR_RATES.items():
        for split in MODES:
            for rate in rates:
                yield Trial("ours", model, trace, split, rate, system=OURS)
    for (model, trace), rates in _FP8_RATES.items():
        for rate in rates:
            trial = Trial("ours", model, trace, HYBRID, rate, system=OURS, quantization="fp8")
            yield replace(trial, label=f"{HYBRID} FP8")


POLICY_RATES: dict[tuple[str, str], tuple[float, ...]] = {
    (LLADA, SHAREGPT): (7, 10, 11),
    (LLADA, ARXIV): (7, 11, 12),
    (DREAM, SHAREGPT): (8, 12, 13),
    (DREAM, ARXIV): (9, 13, 14),
}
"""A moderate load and two high ones."""


WINNER = "C: B, 20 blocks a decoder"
OTHER_COMMITS = {LLADA: (1.5, 1.9), DREAM: (1.2, 1.4)}


def variants(model: str, trace: str) -> Iterator[Trial]:
    """Every policy that was tried, as a trial without its rate."""
    base = Trial("beyond", model, trace, HYBRID, 0, system=OURS, label="Algorithm 2")
    small = replace(base, tau_prefill_tokens=2048)
    delay = replace(small, placement=SHORTEST_DELAY)
    yield replace(base, split=COLOCATED, label=f"{COLOCATED}, tau 1024")
    yield replace(base, split=COLOCATED, label=f"{COLOCATED}, tau 16384", tau_tokens=16384)
    yield replace(base, split=DISAGGREGATED, label=DISAGGREGATED)
    yield replace(base, label=f"{HYBRID}, Algorithm 2")
    yield replace(small, label="A: 5P3C, tau 2048 on prefill workers")
    yield replace(delay, label="B: A, overflow by predicted delay")
    yield replace(delay, label=WINNER, max_blocks_per_decoder=20)
    yield replace(delay, label="D: B, 16 blocks a decoder", max_blocks_per_decoder=16)
    yield replace(small, label="A, 20 blocks a decoder", max_blocks_per_decoder=20)
    yield replace(base, label=f"{HYBRID}, adaptive tau", admission=ADAPTIVE)
    yield replace(base, split=COLOCATED, label=f"{COLOCATED}, adaptive tau", admission=ADAPTIVE)
    yield replace(base, split=COLOCATED, label=f"{COLOCATED}, decode-aware", placement=DECODE_AWARE)
    yield replace(delay, label="B on 4P4C", split="4P4C")
    yield replace(delay, label="B on 6P2C", split="6P2C")


def reference_labels() -> tuple[str, ...]:
    """The paper's modes among the variants: what a policy has to beat."""
    return (
        f"{COLOCATED}, tau 1024",
        f"{COLOCATED}, tau 16384",
        DISAGGREGATED,
        f"{HYBRID}, Algorithm 2",
    )


def beyond() -> Iterator[Trial]:
    """Policies that the paper does not have, at a moderate and two high loads."""
    for (model, trace), rates in POLICY_RATES.items():
        for variant in variants(model, trace):
            for rate in rates:
                yield replace(variant, rate=rate)


def repeats() -> Iterator[Trial]:
    """The high loads again with other requests: what a policy has to beat, and the winner."""
    wanted = {*reference_labels(), WINNER}
    for trial in beyond():
        if trial.label in wanted and trial.rate != POLICY_RATES[trial.model, trial.trace][0]:
            for seed in SEEDS:
                yield replace(trial, study="repeats", seed=seed)


def other_commits() -> Iterator[Trial]:
    """Other tokens a pass than the models' constants: do the modes' claims hang on them?"""
    for model, trace in PAIRS:
        for commits in OTHER_COMMITS[model]:
            for split in MODES:
                for rate in (7, 8, 9, 10, OVERLOAD_RATES[PAPER]):
                    yield Trial(
                        "other commits", model, trace, split, rate, commits_per_pass=commits
                    )


def every_trial() -> Iterator[Trial]:
    """All of them."""
    for study in (
        modes,
        saturation,
        ratios,
        colocated_budgets,
        hybrid_budgets,
        thresholds,
        batch_one,
        ours,
        beyond,
        repeats,
        other_commits,
    ):
        yield from study()
