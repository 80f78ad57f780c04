"""Which lengths are drawn when only a median, a P99 and a standard deviation are known.

Decides the distribution: the one of the largest entropy over the whole numbers of a range that has
these three statistics, i.e. the one that assumes nothing else. It is a Gaussian shape (of positive
or, for statistics as wide as ShareGPT's prompts, negative curvature) with half of its mass up to
the median, 49 % from there to the P99 and 1 % above. No files, no randomness; called by
``synthetic``.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sangam_core.errors import ConfigurationError

_BISECTIONS = 80
_MEAN_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """What is known of a length, in tokens.

    Attributes:
        low, high: the range, both included.
    """

    median: int
    p99: int
    std: float
    low: int
    high: int


def fitted_masses(known: LengthStatistics) -> NDArray[np.float64]:
    """Probability of each length from ``low`` to ``high``.

    Raises:
        ConfigurationError: the statistics contradict each other (no distribution has them).
    """
    if not known.low < known.median < known.p99 < known.high:
        raise ConfigurationError(f"lengths must obey low < median < p99 < high: {known}")
    lengths = np.arange(known.low, known.high + 1, dtype=np.float64)
    scaled = (lengths - known.median) / (known.high - known.low)
    target = known.std / (known.high - known.low)
    pieces = (
        (lengths <= known.median, 0.5),
        ((lengths > known.median) & (lengths <= known.p99), 0.49),
        (lengths > known.p99, 0.01),
    )
    flat, peaked = -200.0, 5000.0
    if (
        not _std(_masses(scaled, pieces, peaked), scaled)
        < target
        < _std(_masses(scaled, pieces, flat), scaled)
    ):
        raise ConfigurationError(f"no distribution has these statistics: {known}")
    for _ in range(_BISECTIONS):
        curvature = (flat + peaked) / 2
        if _std(_masses(scaled, pieces, curvature), scaled) > target:
            flat = curvature
        else:
            peaked = curvature
    return _masses(scaled, pieces, (flat + peaked) / 2)


def _masses(
    scaled: NDArray[np.float64],
    pieces: tuple[tuple[NDArray[np.bool_], float], ...],
    curvature: float,
) -> NDArray[np.float64]:
    """exp(-curvature (x - mean)^2) with the mass of each piece fixed and its own mean.

    The entropy's maximum is stationary in the mean, which is why the shape is centred on it.
    """
    masses = np.empty_like(scaled)
    mean = 0.0
    for _ in range(_MEAN_ROUNDS):
        exponent = -curvature * (scaled - mean) ** 2
        for piece, mass in pieces:
            shape = np.exp(exponent[piece] - exponent[piece].max())
            masses[piece] = mass * shape / shape.sum()
        found = float(masses @ scaled)
        if abs(found - mean) < 1e-10:
            break
        mean = found
    return masses


def _std(masses: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    mean = float(masses @ values)
    return float(np.sqrt(masses @ (values - mean) ** 2))


def lengths_at(
    masses: NDArray[np.float64], low: int, quantiles: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The lengths at quantiles in [0, 1): the inverse of the cumulative distribution."""
    cumulative = np.cumsum(masses)
    index = np.searchsorted(cumulative / cumulative[-1], quantiles, side="right")
    return (low + np.minimum(index, len(masses) - 1)).astype(np.int64)
