"""Finds constants by bounded least squares, and says which of them the measurements cannot tell.

Decides the search and what counts as told; which constants are free, and what they are compared
with, is ``fit``'s. Deterministic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sangam_core.errors import ConfigurationError
from sangam_loadtest.costs.table import Table

WIDEST_SPREAD = 0.5
"""A constant whose standard error is a larger share of it than that is not told by the rows."""

_NULL_SPACE = 1e-7
"""Singular values below this share of the largest: constants that can be traded at no cost."""

_AT_BOUND = 1e-3
"""Closer than that to a bound, in the search's scale, a constant counts as being at it."""

_MOST_STEPS = 60

Vector = NDArray[np.float64]


class FitError(ConfigurationError):
    """The measurements cannot determine the constants."""


@dataclass(frozen=True, slots=True)
class Free:
    """A constant to be found.

    Attributes:
        section, entry, name: where it is in the table.
        start: where the search begins, and its scale; above 0.
        low, high: bounds; the believable ones of its field by default.
        neutral: what it is left at if the measurements cannot tell it; None: they must.
    """

    section: str
    entry: str
    name: str
    start: float
    low: float | None = None
    high: float | None = None
    neutral: float | None = None

    @property
    def title(self) -> str:
        """Its name in the table."""
        return f"{self.section}.{self.entry}.{self.name}"

    def into(self, table: Table, value: float) -> Table:
        """The table with this value."""
        constants = getattr(table, self.section)[self.entry]
        changed = replace(constants, **{self.name: value})
        return table.with_entry(self.section, self.entry, changed)

    def bounds(self, table: Table) -> tuple[float, float]:
        """Lowest and highest value."""
        constants: Any = getattr(table, self.section)[self.entry]
        metadata = {item.name: item.metadata for item in fields(constants)}[self.name]
        low = metadata["low"] if self.low is None else self.low
        return low, metadata["high"] if self.high is None else self.high


@dataclass(frozen=True, slots=True)
class Solution:
    """What a search found.

    Attributes:
        spreads: standard error of each constant found, as a share of it, by title.
        warnings: constants that the measurements do not tell, or tell badly.
    """

    table: Table
    spreads: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def solve(
    table: Table, free: Sequence[Free], residuals: Callable[[Table], Sequence[float]]
) -> Solution:
    """Find the values of ``free`` that make the squared ``residuals`` least.

    A constant that may be left alone is left at its neutral value when the rows cannot tell it,
    the worst one first, and the others are found again.

    Raises:
        FitError: there are fewer residuals than constants, or nothing depends on one of them.
    """
    left = list(free)
    warnings: list[str] = []
    while True:
        solution, values = _search(table, left, residuals)
        dropped = _worst_told(left, values, solution.spreads)
        if dropped is None:
            break
        assert dropped.neutral is not None
        left.remove(dropped)
        table = dropped.into(table, dropped.neutral)
        told = f"the measurements do not tell {dropped.title}: left at {dropped.neutral:g}"
        warnings.append(told)
    warnings += [
        f"the measurements tell {title} only to within {spread:.0%}"
        for title, spread in solution.spreads.items()
        if spread > WIDEST_SPREAD
    ]
    return replace(solution, warnings=tuple(warnings))


def _worst_told(
    free: Sequence[Free], values: dict[str, float], spreads: dict[str, float]
) -> Free | None:
    """The optional constant that is told worst, if it is told badly; zeros among them."""
    optional = [item for item in free if item.neutral is not None]
    worst = max(optional, key=lambda item: spreads[item.title], default=None)
    if worst is None or spreads[worst.title] <= WIDEST_SPREAD:
        return None
    return worst


def _search(
    table: Table, free: Sequence[Free], residuals: Callable[[Table], Sequence[float]]
) -> tuple[Solution, dict[str, float]]:
    # Slow to import, and every command of ``sangam`` loads this module.
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    axes = [_Axis.of(item, table) for item in free]

    def changed(x: Vector) -> Table:
        result = table
        for axis, value in zip(axes, x, strict=True):
            result = axis.free.into(result, axis.value(float(value)))
        return result

    def differences(x: Vector) -> Vector:
        return np.asarray(residuals(changed(x)), dtype=np.float64)

    low, high = np.array([a.low for a in axes]), np.array([a.high for a in axes])
    start = np.clip(np.array([a.start for a in axes]), low, high)
    num_rows = len(differences(start))
    titles = [item.title for item in free]
    if num_rows < len(free):
        raise FitError(
            f"{num_rows} measurements cannot determine {len(free)} constants ({', '.join(titles)})"
        )
    found = least_squares(differences, start, bounds=(low, high), max_nfev=_MOST_STEPS)
    x = np.where(found.x < low + _AT_BOUND, low, found.x)
    x = np.where(x > high - _AT_BOUND, high, x)

    for item, column in zip(free, found.jac.T, strict=True):
        if item.neutral is None and not np.any(np.abs(column) > 1e-12):
            raise FitError(f"no measurement depends on {item.title}; measure more kinds of passes")
    is_inside = (x > low) & (x < high)
    errors = np.zeros(len(free))
    errors[is_inside] = _standard_errors(found.jac[:, is_inside], float(2 * found.cost))
    spreads = [
        axis.spread(float(value), float(error))
        for axis, value, error in zip(axes, x, errors, strict=True)
    ]
    values = [axis.value(float(value)) for axis, value in zip(axes, x, strict=True)]
    return (
        Solution(changed(x), dict(zip(titles, spreads, strict=True))),
        dict(zip(titles, values, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """How the search sees a constant: as a logarithm where it must be above 0, in its scale."""

    free: Free
    low: float
    high: float
    start: float
    is_log: bool

    @classmethod
    def of(cls, free: Free, table: Table) -> "_Axis":
        low, high = free.bounds(table)
        scaled_low, scaled_high = low / free.start, high / free.start
        if low > 0:
            return cls(free, float(np.log(scaled_low)), float(np.log(scaled_high)), 0.0, True)
        return cls(free, scaled_low, scaled_high, 1.0, False)

    def value(self, x: float) -> float:
        return self.free.start * (float(np.exp(x)) if self.is_log else x)

    def spread(self, x: float, error: float) -> float:
        if self.is_log:
            return error
        return error / x if x > self.low else 0.0


def _standard_errors(jacobian: Vector, squares: float) -> list[float]:
    """Standard error of each unknown; infinite where unknowns can be traded for each other."""
    num_rows, num_values = jacobian.shape
    if not num_values:
        return []
    _, singular, directions = np.linalg.svd(jacobian, full_matrices=False)
    variance = squares / max(1, num_rows - num_values)
    is_null = singular <= _NULL_SPACE * singular[0]
    errors = []
    for parts in directions.T:
        if np.any(np.abs(parts[is_null]) > 1e-3):
            errors.append(float("inf"))
            continue
        scaled = parts[~is_null] / singular[~is_null]
        errors.append(float(np.sqrt(variance * np.sum(scaled**2))))
    return errors
