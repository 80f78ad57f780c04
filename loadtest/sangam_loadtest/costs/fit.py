"""Finds the cost model's constants from measurements, operator by operator.

Decides which constants are free, which lines tell them, and in which order; the search is
``solve``'s, what is compared ``comparisons``'. Two kinds of device: one whose ceilings are in the
table (a GPU: factors over them, at least 1), and one of effective rates (a CPU: rates, and what a
pass and a sequence take besides). Called by ``accuracy`` and ``sangam loadtest fit``.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from sangam_loadtest.costs import comparisons as compare
from sangam_loadtest.costs.comparisons import BASELINE, Comparison, Predictor
from sangam_loadtest.costs.constants import (
    AttentionConstants,
    LaunchConstants,
    ProductConstants,
    SamplingConstants,
    SmallConstants,
)
from sangam_loadtest.costs.gpus import Gpu
from sangam_loadtest.costs.measurements import MeasuredPass, MeasuredProducts, Measurements
from sangam_loadtest.costs.operators import BF16, FP8
from sangam_loadtest.costs.solve import FitError, Free, solve
from sangam_loadtest.costs.table import Table

SHARPNESS = 4.0
"""p of the p-norms whose two terms seldom meet, so that measurements cannot tell it."""

BANDWIDTH_BOUND = 2.5
"""Attention that takes longer than so many times its bytes is bound by something else; with less
bandwidth (an H100) it would not slow down accordingly."""

_NEVER_BINDS = 1e12
"""Bytes a second: a bandwidth that no line shows."""

Compared = Callable[[Predictor], Iterable[Comparison]]


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants that were found.

    Attributes:
        entries: (section, entry) of the table that were found, or set for the fit.
        spreads: standard error of each constant found, as a share of it, by its title.
        warnings: what the measurements did not tell.
    """

    table: Table
    gpu: str
    has_ceilings: bool
    entries: tuple[tuple[str, str], ...]
    spreads: dict[str, float]
    warnings: tuple[str, ...]


def fit(measured: Measurements, table: Table, gpu: str) -> Fit:
    """Find the constants that the measurements tell; the others stay as in the table.

    Args:
        gpu: the device. One that is not in the table gets effective rates.

    Raises:
        FitError: the measurements cannot determine a constant that is needed.
        ConfigurationError: a model is not known.
    """
    if not measured.models:
        raise FitError("there are no measurements to fit")
    has_ceilings = gpu in table.gpus.entries
    stages = _Stages(table, gpu)
    if has_ceilings:
        _fit_factors(stages, measured)
    else:
        _fit_rates(stages, measured.passes)
    entries = tuple(dict.fromkeys(stages.entries))
    return Fit(stages.table, gpu, has_ceilings, entries, stages.spreads, tuple(stages.warnings))


class _Stages:
    """Fits one after the other, each with the constants that those before it found."""

    def __init__(self, table: Table, gpu: str) -> None:
        self.table = table
        self.gpu = gpu
        self.entries: list[tuple[str, str]] = []
        self.spreads: dict[str, float] = {}
        self.warnings: list[str] = []

    def find(self, free: Sequence[Free], *compared: Compared) -> None:
        """Find constants from all that is compared."""

        def residuals(table: Table) -> list[float]:
            predictor = Predictor(table, self.gpu)
            return [item.residual for each in compared for item in each(predictor)]

        solution = solve(self.table, free, residuals)
        self.table = solution.table
        self.spreads |= solution.spreads
        self.warnings += solution.warnings
        self.entries += [(item.section, item.entry) for item in free]

    def set(self, section: str, entry: str, constants: object) -> None:
        """Give an entry its form, before some of its constants are found."""
        self.table = self.table.with_entry(section, entry, constants)
        self.entries.append((section, entry))


# A device whose ceilings are known


def _fit_factors(stages: _Stages, measured: Measurements) -> None:
    passes = [row for row in measured.passes if not compare.is_baseline(row)]
    plain = [row for row in passes if row.quantization == BF16]
    _fit_products(stages, measured.products)
    _choose_backends(stages, plain)
    if any(row.launch == "eager" and row.host for row in plain):
        free = [Free("launch", BF16, "layer_seconds", 3e-4)]
        stages.find(free, lambda predictor: compare.of_host(predictor, plain))
    if plain:
        _fit_passes(stages, plain, has_products=bool(measured.products))
    if quantized := [row for row in passes if row.quantization == FP8]:
        free = [
            Free("launch", FP8, "layer_seconds", 5e-4),
            Free("small", FP8, "layer_seconds", 1e-5),
            Free("small", FP8, "bytes_factor", 1.0),
        ]
        stages.find(free, lambda predictor: compare.of_pass(predictor, quantized))
    if baseline := [row for row in measured.passes if compare.is_baseline(row)]:
        free = [
            Free("systems", BASELINE, "launch_factor", 3.0),
            Free("systems", BASELINE, "small_factor", 3.0),
        ]
        stages.find(free, lambda predictor: compare.of_pass(predictor, baseline))


def _fit_products(stages: _Stages, rows: Sequence[MeasuredProducts]) -> None:
    if rows:
        free = _roofline("products", BF16)
        stages.find(free, lambda predictor: compare.of_products(predictor, rows, BF16))
    if any(row.fp8 for row in rows):
        free = _roofline("products", FP8)
        stages.find(free, lambda predictor: compare.of_products(predictor, rows, FP8))
    if any(row.head for row in rows):
        stages.find(_roofline("head", BF16), lambda predictor: compare.of_head(predictor, rows))


def _fit_passes(stages: _Stages, rows: Sequence[MeasuredPass], *, has_products: bool) -> None:
    """Small kernels from passes without attention, then attention, backend by backend."""
    small = stages.table.small[BF16]
    free = [
        Free("small", BF16, "layer_seconds", 1e-5),
        Free("small", BF16, "bytes_factor", 1.0, neutral=small.bytes_factor),
        Free("launch", BF16, "attention_share", 0.2, neutral=0.0),
    ]
    if not has_products:
        free += _roofline("products", BF16)[:2]
    stages.find(free, lambda predictor: compare.of_pass_without_attention(predictor, rows))
    for name in dict.fromkeys(compare.attention_entry(row) for row in rows):
        own = [row for row in rows if compare.attention_entry(row) == name]
        stages.set("attention", name, AttentionConstants(0.0, 0.0, 1.0, 1.0, SHARPNESS))
        free = [
            Free("attention", name, "layer_seconds", 1e-5, neutral=0.0),
            Free("attention", name, "sequence_seconds", 1e-6, neutral=0.0),
            Free("attention", name, "bytes_factor", 1.5, low=1.0, high=BANDWIDTH_BOUND),
            Free("attention", name, "flops_factor", 1.5, low=1.0),
        ]
        stages.find(
            free,
            lambda predictor, own=own: compare.of_attention(predictor, own),  # type: ignore[misc]
            lambda predictor, own=own: compare.of_pass(predictor, own),  # type: ignore[misc]
        )


def _choose_backends(stages: _Stages, rows: Sequence[MeasuredPass]) -> None:
    """Give each model the attention that took less over the batches that all were measured on."""
    for model in dict.fromkeys(row.model for row in rows):
        times: dict[str, dict[object, float]] = {}
        for row in rows:
            if row.model == model:
                own = times.setdefault(compare.attention_entry(row), {})
                own[row.batch, row.launch] = row.total
        common = set.intersection(*(set(own) for own in times.values()))
        best = min(times, key=lambda name: sum(math.log(times[name][key]) for key in common))
        stages.set("backends", model, best)


def _roofline(section: str, entry: str) -> list[Free]:
    return [
        Free(section, entry, "bytes_factor", 1.3, low=1.0),
        Free(section, entry, "flops_factor", 1.3, low=1.0),
        Free(section, entry, "sharpness", SHARPNESS),
    ]


# A device of effective rates


def _fit_rates(stages: _Stages, rows: Sequence[MeasuredPass]) -> None:
    """One fit of all: rates, and what a pass, a sequence and a row take besides."""
    if any(not row.is_worker for row in rows) or not rows:
        known = ", ".join(stages.table.gpus.entries)
        raise FitError(
            f"the table has no device {stages.gpu!r} ({known}), so its rates must come from a "
            "worker's iterations, which have a column rows_masked (make bench-passes)"
        )
    device = stages.gpu
    _choose_backends(stages, rows)
    attentions = tuple(dict.fromkeys(compare.attention_entry(row) for row in rows))
    stages.set("gpus", device, Gpu(1e11, 1e11, 1e10, 16e9))
    stages.set("products", BF16, ProductConstants(1.0, 1.0, SHARPNESS))
    stages.set("head", BF16, ProductConstants(1.0, 1.0, SHARPNESS))
    stages.set("small", BF16, SmallConstants(0.0, 0.0))
    stages.set("launch", BF16, LaunchConstants(0.0, 0.0))
    stages.set("sampling", "fused", SamplingConstants(0.0, 0.0))
    # The device is the host: what a pass takes besides is never hidden, whoever issues it.
    system = replace(
        stages.table.systems["sangam"],
        head_rows="committable",
        pass_seconds=0.0,
        sequence_seconds=0.0,
        row_seconds=0.0,
    )
    stages.set("systems", "sangam", system)
    free = [
        Free("gpus", device, "bf16_flops", 3e10),
        Free("gpus", device, "bytes_per_second", 1e10, neutral=_NEVER_BINDS),
        Free("products", BF16, "bytes_factor", 0.3, neutral=0.1),
        Free("systems", "sangam", "pass_seconds", 1e-3, neutral=0.0),
        Free("systems", "sangam", "sequence_seconds", 5e-4, neutral=0.0),
    ]
    if len(dict.fromkeys(row.model for row in rows)) > 1:
        # With one model, time a row and time for a row's FLOPs are the same thing.
        free.append(Free("systems", "sangam", "row_seconds", 5e-6, neutral=0.0))
    for name in attentions:
        stages.set("attention", name, AttentionConstants(0.0, 0.0, 1.0, 1.0, SHARPNESS))
        free += [
            Free("attention", name, "sequence_seconds", 5e-5, neutral=0.0),
            Free("attention", name, "flops_factor", 1.0),
        ]
    stages.find(
        free,
        lambda predictor: compare.of_pass(predictor, rows),
        lambda predictor: compare.of_pass_without_attention(predictor, rows),
    )
    found = stages.table.gpus[device]
    stages.set("gpus", device, replace(found, fp8_flops=found.bf16_flops))
