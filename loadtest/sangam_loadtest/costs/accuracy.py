"""How far a cost model is from what was measured, by operator, on the fitted lines and on others.

Decides how errors are summed up and how lines are held out. Called by ``sangam loadtest fit`` and
by the tests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np

from sangam_loadtest.costs.comparisons import Comparison, Predictor, all_comparisons, is_baseline
from sangam_loadtest.costs.fit import Fit, fit
from sangam_loadtest.costs.measurements import MeasuredPass, Measurements
from sangam_loadtest.costs.solve import FitError
from sangam_loadtest.costs.table import Table

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OperatorErrors:
    """Errors of one operator, as shares.

    Attributes:
        median, worst: of what was measured of the operator. worst_label: the line of the worst.
        median_of_pass, worst_of_pass: of the pass that it is part of. What is measured as the
            difference of two passes has their noise, so that its own errors say little.
    """

    operator: str
    num_lines: int
    median: float
    worst: float
    worst_label: str
    median_of_pass: float
    worst_of_pass: float


def errors_by_operator(comparisons: Iterable[Comparison]) -> list[OperatorErrors]:
    """Sums up, in order of appearance."""
    by_operator: dict[str, list[Comparison]] = {}
    for item in comparisons:
        by_operator.setdefault(item.operator, []).append(item)
    return [_summed(operator, items) for operator, items in by_operator.items()]


def in_sample(measured: Measurements, found: Fit) -> list[Comparison]:
    """A fit beside the measurements that it comes from."""
    return all_comparisons(
        Predictor(found.table, found.gpu), measured, has_ceilings=found.has_ceilings
    )


def held_out(
    measured: Measurements, table: Table, gpu: str, num_folds: int = 4, seed: int = 0
) -> list[Comparison]:
    """Every line beside what a fit without it predicts: cross-validation in ``num_folds`` parts.

    Lines of the baseline stay out of it: its constants are as many as they are.

    Raises:
        FitError: a part of the lines cannot determine all constants.
    """
    comparisons: list[Comparison] = []
    kept = tuple(row for row in measured.passes if not is_baseline(row))
    pass_folds = _folds([_kind(row) for row in kept], num_folds, seed)
    product_folds = _folds([row.model for row in measured.products], num_folds, seed)
    for number in range(num_folds):
        passes, other_passes = _split(kept, pass_folds, number)
        products, other_products = _split(measured.products, product_folds, number)
        found = fit(Measurements(other_passes, other_products), table, gpu)
        comparisons += in_sample(Measurements(passes, products), found)
    if not comparisons:
        raise FitError("there is nothing to hold out")
    return comparisons


def _kind(row: MeasuredPass) -> str:
    batch = row.batch
    return f"{row.launch} {row.quantization} {bool(batch.num_prefills)} {bool(batch.num_decodes)}"


def _folds(kinds: Sequence[str], num_folds: int, seed: int) -> list[int]:
    """The fold of each line: shuffled, and the lines of a kind spread over all folds."""
    order = np.random.default_rng(seed).permutation(len(kinds))
    dealt = sorted((int(index) for index in order), key=lambda index: kinds[index])
    folds = [0] * len(kinds)
    for position, index in enumerate(dealt):
        folds[index] = position % num_folds
    return folds


def _split(
    lines: Sequence[T], folds: Sequence[int], number: int
) -> tuple[tuple[T, ...], tuple[T, ...]]:
    own = tuple(line for line, fold in zip(lines, folds, strict=True) if fold == number)
    others = tuple(line for line, fold in zip(lines, folds, strict=True) if fold != number)
    return own, others


def _summed(operator: str, items: Sequence[Comparison]) -> OperatorErrors:
    relative = [abs(item.relative_error) for item in items]
    of_pass = [abs(item.predicted - item.measured) / item.of_pass for item in items]
    worst = max(items, key=lambda item: abs(item.relative_error))
    return OperatorErrors(
        operator=operator,
        num_lines=len(items),
        median=median(relative),
        worst=abs(worst.relative_error),
        worst_label=worst.label,
        median_of_pass=median(of_pass),
        worst_of_pass=max(of_pass),
    )
