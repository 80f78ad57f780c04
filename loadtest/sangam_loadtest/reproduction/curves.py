"""Latency against rate of one deployment, and what can be read off: which holds longest.

Pure arithmetic over runs. Called by ``claims`` and ``tables``.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from sangam_loadtest.report.runs import Run
from sangam_loadtest.reproduction.runner import Results
from sangam_loadtest.reproduction.trial import Trial


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One rate: seconds of latency, and the parts that queue."""

    rate: float
    mean: float
    p99: float
    prefill_queueing: float
    decode_queueing: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A deployment over rising rates."""

    points: tuple[CurvePoint, ...]

    def at(self, rate: float) -> CurvePoint:
        """The point of a rate that was simulated. ``KeyError`` if it was not."""
        for point in self.points:
            if point.rate == rate:
                return point
        raise KeyError(rate)

    @property
    def rates(self) -> tuple[float, ...]:
        """Every rate, rising."""
        return tuple(point.rate for point in self.points)

    def rate_within(self, bound: float, statistic: str = "mean") -> float | None:
        """Highest rate at which a statistic is within ``bound`` seconds, between points by a
        straight line. None where even the lowest rate is over it; the highest rate simulated where
        none is."""
        last: tuple[float, float] | None = None
        for point in self.points:
            value = float(getattr(point, statistic))
            if value > bound:
                if last is None:
                    return None
                rate, before = last
                return rate + (point.rate - rate) * (bound - before) / (value - before)
            last = point.rate, value
        return None if last is None else last[0]


def curve_of(results: Results, wanted: Callable[[Trial], bool]) -> Curve:
    """The curve of the trials wanted, which must differ in their rate alone."""
    found = sorted((t for t in results if wanted(t)), key=lambda trial: trial.rate)
    assert len({trial.rate for trial in found}) == len(found), "one trial a rate"
    return Curve(tuple(_points(results, found)))


def sustained_rate(run: Run) -> float:
    """Answers a second of an overloaded run, from the 30th to the 70th percent of its answers: by
    then the system is full, and as yet more arrives than it can take."""
    ended = run.records.answered("scheduled_seconds") + run.records.answered("latency_seconds")
    early, late = np.percentile(ended, (30, 70))
    return float(0.4 * len(ended) / (late - early))


def _points(results: Results, trials: Iterable[Trial]) -> Iterable[CurvePoint]:
    for trial in trials:
        run = results[trial]
        yield CurvePoint(
            trial.rate,
            run.mean("latency_seconds"),
            run.percentile("latency_seconds", 99),
            run.mean("prefill_queueing_seconds"),
            run.mean("decode_queueing_seconds"),
        )
