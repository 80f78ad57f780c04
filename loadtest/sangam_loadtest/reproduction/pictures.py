"""The page's figures: the report's own, of the right trials each.

Decides which trials a figure shows. Called by ``page``.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from sangam_loadtest.costs.batch import PassBatch
from sangam_loadtest.costs.model import cost_model
from sangam_loadtest.report.drawn import Drawn
from sangam_loadtest.report.figures import (
    decode_time_against_batch,
    iterations_against_output,
    latency_against_rate,
    latency_breakdown,
    queueing_and_decode_cdfs,
    tau_sweep,
)
from sangam_loadtest.report.passes import Passes
from sangam_loadtest.report.runs import Run
from sangam_loadtest.reproduction.runner import Results
from sangam_loadtest.reproduction.studies import (
    ARXIV,
    BREAKDOWN_RATES,
    BUDGET_THETAS,
    DREAM,
    HYBRID,
    LLADA,
    RATIO_RATE,
    SHAREGPT,
)
from sangam_loadtest.reproduction.trial import GPU, LINK, OURS, Trial
from sangam_loadtest.simulator.system import PAPER

_BLOCK_TOKENS, _CONTEXT_TOKENS = 32, 2048


def draw(results: Results, folder: Path) -> dict[str, list[Drawn]]:
    """Every figure, by the section of the page that it stands in."""

    def of(study: str, *, where: Callable[[Trial], bool] = lambda trial: True) -> list[Run]:
        return [run for trial, run in results.items() if trial.study == study and where(trial)]

    ratios = of("ratios", where=lambda trial: trial.rate == RATIO_RATE)
    modes, busiest = of("modes"), _busiest(results)
    everything = of("ours", where=lambda trial: trial.quantization == "bf16")
    return {
        "3.3": [
            queueing_and_decode_cdfs(ratios, folder / "ratios-cdf.png"),
            decode_time_against_batch(list(_decode_passes()), folder / "decode-time.png"),
            iterations_against_output(_one_of_each(results), folder / "iterations.png"),
        ],
        "6.2": [
            latency_against_rate(modes, folder / "modes.png", max_seconds=30),
            latency_breakdown(busiest, folder / "breakdown.png"),
        ],
        "6.3": [tau_sweep(of("colocated budgets"), folder / "colocated-tau.png")],
        "6.4": [tau_sweep(of("hybrid budgets", where=_is_drawn), folder / "hybrid-tau.png")],
        "6.5": [latency_against_rate(_batching(results), folder / "batch-one.png", max_seconds=20)],
        "ours": [latency_against_rate(everything, folder / "ours.png", max_seconds=30)],
    }


def _is_drawn(trial: Trial) -> bool:
    """The thetas between which a hybrid's budget begins to matter, not the one in the middle."""
    return trial.theta_tokens in (BUDGET_THETAS[0], BUDGET_THETAS[-1])


def _busiest(results: Results) -> list[Run]:
    """The modes of each pair at one rate near saturation."""
    return [
        run
        for trial, run in results.items()
        if trial.study == "modes" and trial.rate == BREAKDOWN_RATES[trial.model, trial.trace]
    ]


def _batching(results: Results) -> list[Run]:
    pairs = {(LLADA, SHAREGPT), (DREAM, ARXIV)}
    beside = [
        run
        for trial, run in results.items()
        if trial.study == "modes"
        and (trial.model, trial.trace) in pairs
        and trial.split != "5P3D"
        and trial.system == PAPER
    ]
    return beside + [run for trial, run in results.items() if trial.study == "batch one"]


def _one_of_each(results: Results) -> list[Run]:
    """A run of each model, with either trace."""
    found = {
        (trial.model, trial.trace): run
        for trial, run in results.items()
        if trial.study == "modes" and trial.split == HYBRID
    }
    return list(found.values())


def _decode_passes() -> Iterator[Passes]:
    """Decode-only iterations by the cost model, contexts of 2,048 tokens."""
    blocks = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48])
    for model in (LLADA, DREAM):
        for system in (PAPER, OURS):
            costs = cost_model(GPU, model, system, link=LINK)
            yield Passes(
                model,
                system,
                blocks.astype(np.float64),
                np.full(len(blocks), float(_CONTEXT_TOKENS)),
                np.array([costs.seconds(_decodes(int(number))) for number in blocks]),
            )


def _decodes(num_blocks: int) -> PassBatch:
    rows, keys = _BLOCK_TOKENS * num_blocks, _CONTEXT_TOKENS * num_blocks
    return PassBatch(
        num_decodes=num_blocks,
        decode_rows=rows,
        decode_keys=keys,
        decode_row_keys=_BLOCK_TOKENS * keys,
        head_rows=rows,
    )
