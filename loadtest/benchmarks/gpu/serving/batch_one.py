"""Batch-1 serving as a queue: its latencies at any rate, from measured times of single requests.

One request at a time, in order of arrival, is a queue with one server: what a request takes does
not depend on the rate, so that measuring some requests one after another tells every rate at once.
Decides the fit of a request's time (to its blocks, their tokens and its passes), and simulates the
queue over many requests of the trace. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """What a request's time at batch 1 depends on.

    Attributes:
        total_tokens: of the sequence, rows of each block's prefill. num_passes: over all blocks.
    """

    num_blocks: int
    total_tokens: int
    num_passes: int


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """Seconds a block, a block's token and a pass."""

    block: float
    token: float
    num_pass: float
    relative_error: float

    @classmethod
    def fitted(cls, works: Sequence[Work], seconds: Sequence[float]) -> "ServiceTime":
        """Least squares of relative errors, of what adds to a request's time.

        What would take from it, as noise may have it in few requests, counts for nothing.

        Raises:
            ValueError: fewer than three requests.
        """
        if len(works) < 3:
            raise ValueError(f"{len(works)} requests at batch 1 tell no service time; measure more")
        measured = np.array(seconds)
        rows = np.array([_row(work) for work in works]) / measured[:, None]
        found = np.zeros(rows.shape[1])
        used = np.arange(rows.shape[1])
        while len(used):
            found[:] = 0.0
            found[used], *_ = np.linalg.lstsq(rows[:, used], np.ones(len(works)), rcond=None)
            if (found >= 0).all():
                break
            used = used[found[used] >= 0]
        error = float(np.abs(rows @ found - 1).mean())
        block, token, num_pass = found.tolist()
        return cls(block, token, num_pass, error)

    def seconds(self, works: Sequence[Work]) -> Floats:
        """Of each request."""
        rows = np.array([_row(work) for work in works])
        return np.asarray(rows @ np.array([self.block, self.token, self.num_pass]))


def _row(work: Work) -> list[float]:
    return [work.num_blocks, work.num_blocks * work.total_tokens, work.num_passes]


def queued_latencies(arrivals: Floats, service: Floats) -> Floats:
    """Seconds from arrival to end of each request, served one at a time in order (Lindley 1952)."""
    ends = np.empty_like(service)
    free_at = 0.0
    for index, (arrival, seconds) in enumerate(zip(arrivals, service, strict=True)):
        free_at = max(free_at, arrival) + seconds
        ends[index] = free_at
    return ends - arrivals


@dataclass(frozen=True, slots=True)
class Point:
    """One rate.

    Attributes:
        is_saturated: latencies grew until the end; they say nothing then.
    """

    rate: float
    mean_seconds: float
    p99_seconds: float
    num_requests: int
    is_saturated: bool = False


def curve(service: Floats, rates: Sequence[float], seed: int = 0) -> list[Point]:
    """Latencies of the requests at each rate that one server can keep up with, Poisson arrivals."""
    gaps = np.random.default_rng(seed).exponential(1.0, len(service))
    points = []
    for rate in rates:
        if rate * float(service.mean()) < 1:
            latencies = queued_latencies(np.cumsum(gaps) / rate, service)
            points.append(point_of(rate, latencies))
    return points


def point_of(
    rate: float, latencies: Sequence[float] | Floats, *, is_saturated: bool = False
) -> Point:
    """Mean and P99 of some latencies."""
    mean, p99 = float(np.mean(latencies)), float(np.percentile(latencies, 99))
    return Point(rate, mean, p99, len(latencies), is_saturated)


def rate_at(points: Sequence[Point], mean_seconds: float) -> float | None:
    """The rate at which the mean latency reaches a value, by a straight line between two points.

    ``None`` where the points do not enclose it.
    """
    steady = sorted((each for each in points if not each.is_saturated), key=lambda each: each.rate)
    for low, high in pairwise(steady):
        if low.mean_seconds <= mean_seconds <= high.mean_seconds:
            share = (mean_seconds - low.mean_seconds) / (high.mean_seconds - low.mean_seconds)
            return low.rate + share * (high.rate - low.rate)
    return None
