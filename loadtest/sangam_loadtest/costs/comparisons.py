"""Sets what a table predicts beside what was measured, operator by operator.

Decides how a measured line is predicted, and what of it is told about which operator: products
and head have lines of their own, attention is the difference that its call makes, small kernels
are what is left, the host is the time to issue a pass. Called by ``fit`` and ``accuracy``.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from sangam_loadtest.costs.constants import SamplingConstants
from sangam_loadtest.costs.measurements import MeasuredPass, MeasuredProducts, Measurements
from sangam_loadtest.costs.model import CostModel
from sangam_loadtest.costs.operators import BF16, FP8, head_product, layer_products
from sangam_loadtest.costs.shapes import shape_of
from sangam_loadtest.costs.table import Table

BASELINE = "fast-dllm"
"""System, and end of the engine's name, of plain PyTorch at batch 1."""

PASS_NOISE = 0.03
"""Passes repeat to within a few per cent (H200 profile: eager and graph at 2,048 rows)."""

_ATTENTION_NOISE = 0.1
_HOST_BOUND = 1.15
"""A pass shorter than so many times its host time says little about the device."""

_WORKER = "bench-worker"
_NO_SAMPLING = "none"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One operator of one measured line, in seconds.

    Attributes:
        of_pass: the whole that it is part of; where it is measured as a difference of passes,
            their noise is its own.
        is_difference: measured as the difference of two passes, or of a pass and predictions.
    """

    operator: str
    label: str
    predicted: float
    measured: float
    of_pass: float
    is_difference: bool = False

    @property
    def relative_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1

    @property
    def residual(self) -> float:
        """The error in units of the measurement's noise."""
        if self.is_difference:
            noise = PASS_NOISE * self.of_pass + _ATTENTION_NOISE * abs(self.measured)
            return (self.predicted - self.measured) / noise
        return math.log(self.predicted / self.measured) / PASS_NOISE


class Predictor:
    """What a table says about measured lines, on one device."""

    def __init__(self, table: Table, gpu: str) -> None:
        self._table = _with_bench_systems(table)
        self._gpu = gpu
        self._models: dict[tuple[str, str, str], CostModel] = {}

    def model_of(self, row: MeasuredPass) -> CostModel:
        """The cost model of the engine that ran this line."""
        key = (row.model, row.engine, row.launch + row.quantization)
        if key not in self._models:
            is_plain = is_baseline(row)
            self._models[key] = CostModel(
                self._table,
                self._gpu,
                shape_of(row.model),
                BASELINE if is_plain else _system_of(row),
                row.quantization,
                attention=None if is_plain else attention_entry(row),
            )
        return self._models[key]

    def products(self, row: MeasuredProducts, quantization: str) -> float:
        """Seconds of all layers' products on the line's rows."""
        device, constants = self._table.gpus[self._gpu], self._table.products[quantization]
        terms = layer_products(shape_of(row.model), device, constants, quantization)
        return terms.seconds(row.rows)

    def head(self, row: MeasuredProducts) -> float:
        """Seconds of the head on as many rows."""
        device, constants = self._table.gpus[self._gpu], self._table.head[BF16]
        return head_product(shape_of(row.model), device, constants).seconds(row.rows)


def is_baseline(row: MeasuredPass) -> bool:
    """Whether the line is of plain PyTorch at batch 1."""
    return row.engine.endswith(BASELINE)


def attention_entry(row: MeasuredPass) -> str:
    """Name of the attention constants of a line: its backend, and the layout of the heads."""
    return f"{row.backend}-{shape_of(row.model).attention_kind}"


def of_products(
    predictor: Predictor, rows: Iterable[MeasuredProducts], quantization: str
) -> Iterator[Comparison]:
    """Products of all layers."""
    name = "products" if quantization == BF16 else f"products ({FP8})"
    for row in rows:
        measured = row.bf16 if quantization == BF16 else row.fp8
        if measured is not None:
            predicted = predictor.products(row, quantization)
            yield Comparison(name, row.label, predicted, measured, measured)


def of_head(predictor: Predictor, rows: Iterable[MeasuredProducts]) -> Iterator[Comparison]:
    """The head on as many rows as the products."""
    for row in rows:
        if row.head is not None:
            yield Comparison("head", row.label, predictor.head(row), row.head, row.head)


def of_host(predictor: Predictor, rows: Iterable[MeasuredPass]) -> Iterator[Comparison]:
    """Time to issue a pass kernel by kernel."""
    for row in rows:
        if row.launch == "eager" and row.host is not None:
            predicted = predictor.model_of(row).launch_seconds
            yield Comparison("host", row.label, predicted, row.host, row.total)


def of_pass(predictor: Predictor, rows: Iterable[MeasuredPass]) -> Iterator[Comparison]:
    """Whole passes."""
    for row in rows:
        predicted = predictor.model_of(row).seconds(row.batch)
        name = "pass" if row.quantization == BF16 else f"pass ({row.quantization})"
        yield Comparison(name, row.label, predicted, row.total, row.total)


def of_pass_without_attention(
    predictor: Predictor, rows: Iterable[MeasuredPass]
) -> Iterator[Comparison]:
    """Passes with the attention's call left out."""
    for row in rows:
        if (measured := row.without_attention) is not None:
            predicted = predictor.model_of(row).seconds_without_attention(row.batch)
            yield Comparison("without attention", row.label, predicted, measured, measured)


def of_attention(predictor: Predictor, rows: Iterable[MeasuredPass]) -> Iterator[Comparison]:
    """What the attention's call adds to a pass, where the host does not hide it."""
    for row in rows:
        if row.without_attention is None or _is_host_bound(row, row.without_attention):
            continue
        measured = row.total - row.without_attention
        predicted = predictor.model_of(row).cost(row.batch).attention
        yield Comparison("attention", row.label, predicted, measured, row.total, True)


def of_small(predictor: Predictor, rows: Iterable[MeasuredPass]) -> Iterator[Comparison]:
    """What a pass without attention takes beyond its products and head, as predicted."""
    for row in rows:
        if row.without_attention is None or _is_host_bound(row, row.without_attention):
            continue
        cost = predictor.model_of(row).cost(row.batch)
        measured = row.without_attention - cost.products - cost.head
        yield Comparison("small kernels", row.label, cost.small, measured, row.total, True)


def all_comparisons(
    predictor: Predictor, measured: Measurements, *, has_ceilings: bool
) -> list[Comparison]:
    """All that the measurements say, operator by operator.

    Args:
        has_ceilings: a GPU's. A host that computes itself has no time of its own, and no small
            kernels beside it.
    """
    rows, passes = measured.products, [row for row in measured.passes if not is_baseline(row)]
    plain = [row for row in passes if row.quantization == BF16]
    found = [*of_products(predictor, rows, BF16), *of_products(predictor, rows, FP8)]
    found += [*of_head(predictor, rows), *of_attention(predictor, plain)]
    if has_ceilings:
        found += [*of_small(predictor, plain), *of_host(predictor, plain)]
    found += [*of_pass_without_attention(predictor, plain), *of_pass(predictor, passes)]
    baseline = of_pass(predictor, (row for row in measured.passes if is_baseline(row)))
    return found + [replace(item, operator=f"pass ({BASELINE})") for item in baseline]


def _is_host_bound(row: MeasuredPass, seconds: float) -> bool:
    return row.launch == "eager" and row.host is not None and seconds < _HOST_BOUND * row.host


def _system_of(row: MeasuredPass) -> str:
    return _WORKER if row.is_worker else f"bench-{row.launch}"


def _with_bench_systems(table: Table) -> Table:
    """The table with the systems that benchmarks measure: a worker's engine, and bare kernels."""
    sangam = table.systems["sangam"]
    # A worker's engine under ``make bench-passes``: no graphs, the head only where it must be.
    worker = replace(sangam, head_rows="committable", decode_launch="eager", prefill_launch="eager")
    table = table.with_entry("systems", _WORKER, worker)
    for launch in ("eager", "graph"):
        kernels = replace(
            sangam,
            last_layer="every_row",
            sampling=_NO_SAMPLING,
            decode_launch=launch,
            prefill_launch=launch,
            pass_seconds=0.0,
            sequence_seconds=0.0,
            row_seconds=0.0,
        )
        table = table.with_entry("systems", f"bench-{launch}", kernels)
    return table.with_entry("sampling", _NO_SAMPLING, SamplingConstants(0.0, 0.0))
