"""When the requests of a run are due: a schedule made before the run, never bent by its progress.

Decides the processes of arrival and what "rate" means in each; all are seeded. Called by ``run``,
``capacity`` and the simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp

import numpy as np
from numpy.typing import NDArray

from sangam_core.errors import ConfigurationError

CLIP_OF_MEAN = 3.0
"""The paper's generator clips exponential gaps at this many times their mean."""


class ArrivalProcess(StrEnum):
    """How gaps between requests are drawn."""

    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"
    TRACE = "trace"
    CLIPPED = "clipped"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A process of arrival.

    Attributes:
        rate: requests a second. Of ``clipped`` the nominal one; of ``trace`` None keeps the file's
            own times, a number scales them to that mean rate.
        burstiness: the gamma process's squared coefficient of variation of a gap: 1 is Poisson,
            4 comes in bursts, 0.25 is nearly regular.
    """

    process: ArrivalProcess = ArrivalProcess.POISSON
    rate: float | None = None
    burstiness: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is None and self.process is not ArrivalProcess.TRACE:
            raise ConfigurationError(f"arrivals {self.process} need a rate (--rate)")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigurationError(f"rate must be positive, not {self.rate}")
        if self.burstiness <= 0:
            raise ConfigurationError(f"burstiness must be positive, not {self.burstiness}")

    @property
    def true_rate(self) -> float | None:
        """Mean requests a second that really come: clipping at c means shortens the mean gap to
        1 - exp(-c) of it, so the paper's generator sends 5.2 % more than it says."""
        if self.process is ArrivalProcess.CLIPPED and self.rate is not None:
            return self.rate / (1 - exp(-CLIP_OF_MEAN))
        return self.rate


def schedule(
    arrivals: Arrivals, count: int, stamps: Sequence[float | None] = ()
) -> NDArray[np.float64]:
    """Seconds after the start at which each of ``count`` requests is due, ascending from 0.

    Args:
        stamps: arrival times of the trace's requests, for ``ArrivalProcess.TRACE``.

    Raises:
        ConfigurationError: the trace has no time stamps, or they cannot be scaled.
    """
    if count < 1:
        raise ConfigurationError(f"there must be at least one request, not {count}")
    if arrivals.process is ArrivalProcess.TRACE:
        return _trace_times(arrivals, count, stamps)
    assert arrivals.rate is not None  # __post_init__ holds it
    rng = np.random.default_rng([arrivals.seed, 0xA881])
    mean = 1 / arrivals.rate
    match arrivals.process:
        case ArrivalProcess.CONSTANT:
            gaps = np.full(count - 1, mean)
        case ArrivalProcess.GAMMA:
            shape = 1 / arrivals.burstiness
            gaps = rng.gamma(shape, mean / shape, count - 1)
        case ArrivalProcess.CLIPPED:
            gaps = np.minimum(rng.exponential(mean, count - 1), CLIP_OF_MEAN * mean)
        case _:
            gaps = rng.exponential(mean, count - 1)
    return np.concatenate([np.zeros(1), np.cumsum(gaps)])


def _trace_times(
    arrivals: Arrivals, count: int, stamps: Sequence[float | None]
) -> NDArray[np.float64]:
    known = [stamp for stamp in stamps[:count] if stamp is not None]
    if len(known) < count:
        raise ConfigurationError(
            f"arrivals 'trace': only {len(known)} of {count} requests have a time stamp; use a CSV "
            "with an arrival column, or another process"
        )
    times = np.array(known, dtype=np.float64)
    if np.any(np.diff(times) < 0):
        raise ConfigurationError(
            "arrivals 'trace': time stamps go backwards; keep the file's order (--in-file-order) "
            "and do not repeat it"
        )
    times -= times[0]
    if arrivals.rate is None:
        return times
    if times[-1] <= 0:
        raise ConfigurationError("arrivals 'trace': all time stamps are equal: no rate to scale")
    return times * ((count - 1) / float(times[-1]) / arrivals.rate)
