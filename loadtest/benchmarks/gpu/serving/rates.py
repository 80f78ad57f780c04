"""Serves a trace at one rate after the other, until the worker cannot keep up.

Decides which rates are tried (ever higher, then between the last that held and the first that did
not), what comes at a rate (Poisson arrivals of which each stretch of a run has as many as the rate
says, of the trace's mixture of lengths: a short run of others would be of another rate or of other
work), what counts of it (requests due after the warm-up; others keep the load up until those are
answered), and when a run is given up. Called by the serving command.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.gpu.parts import Budget, say
from benchmarks.gpu.serving.batch_one import Point, point_of
from benchmarks.gpu.serving.open_loop import Driver, Layout, Request
from sangam_loadtest.traces.request import TraceRequest
from sangam_worker.loop import EngineLoop, Executes
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.scheduler import Scheduler

_STOP_SECONDS = 60.0
_STEP = 1.4
_LEAST_SHARE = 1 / 16
"""Of the first rate: below, nothing can be served."""

_NUM_RUNS = 6
"""That should fit into the time."""
_SHORTEST = 0.5

_ENOUGH_REQUESTS = 20
_GROWTH = 1.6
_CLOSEST = 0.06
"""Rates nearer to each other than this share are not told apart by runs as short."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What serves.

    Attributes:
        make_engine: of each run, with a seed (for what it draws).
    """

    make_engine: Callable[[int], Executes]
    layout: Layout
    total_pages: int
    tau_tokens: int

    def serve(
        self,
        requests: Sequence[Request],
        most_in_flight: float,
        is_over: Callable[[Driver], bool],
        seed: int = 0,
    ) -> Driver:
        """Serve the requests on a loop of their own; the driver knows what became of them."""
        config = self.layout.config
        scheduler = Scheduler(
            mask_id=config.mask_id, total_pages=self.total_pages, tau_tokens=self.tau_tokens
        )
        driver = Driver(config, most_in_flight)
        loop = EngineLoop(self.make_engine(seed), scheduler, driver.publish, WorkerMetrics())
        loop.start()
        try:
            driver.run(loop, requests, is_over)
        finally:
            if not loop.stop(_STOP_SECONDS):
                raise TimeoutError("an iteration does not end")
        return driver


@dataclass(frozen=True, slots=True)
class Window:
    """What of a run counts.

    Attributes:
        warm_seconds: requests due before do not count. run_seconds: nor those due after.
        longest_seconds: the run is over then, saturated if counted requests are left.
    """

    warm_seconds: float
    run_seconds: float
    longest_seconds: float

    def fitting(self, left_seconds: float) -> "Window":
        """As long that several runs fit into what is left, and no shorter than half as long."""
        share = left_seconds / (_NUM_RUNS * self.longest_seconds)
        share = min(1.0, max(_SHORTEST, share))
        return Window(
            share * self.warm_seconds, share * self.run_seconds, share * self.longest_seconds
        )

    @property
    def stretches(self) -> list[tuple[float, float]]:
        """Before it, of what counts, and behind it."""
        ends = (0.0, self.warm_seconds, self.run_seconds, self.longest_seconds)
        return [*pairwise(ends)]


def arrivals(
    trace: Sequence[TraceRequest], rate: float, window: Window, seed: int = 0
) -> list[tuple[float, TraceRequest]]:
    """When which requests are due: a Poisson process, given how many come in each stretch."""
    random = np.random.default_rng(seed)
    found: list[tuple[float, TraceRequest]] = []
    for begin, end in window.stretches:
        count = round(rate * (end - begin))
        dues = np.sort(random.uniform(begin, end, count)).tolist()
        found += zip(dues, mixture(trace, count, random), strict=True)
    return found


def mixture(
    trace: Sequence[TraceRequest], count: int, random: np.random.Generator
) -> list[TraceRequest]:
    """So many requests of a trace in any order, evenly from its shortest outputs to its longest."""
    by_size = sorted(trace, key=lambda each: (each.output_tokens, each.prompt_tokens))
    chosen = (np.arange(count) + random.uniform(0, 1, count)) / max(1, count) * len(by_size)
    return [by_size[int(index)] for index in random.permutation(chosen)]


def at_rate(worker: Worker, trace: Sequence[TraceRequest], rate: float, window: Window) -> Point:
    """Serve Poisson arrivals at a rate."""
    requests = [
        worker.layout.request(index, due, asked)
        for index, (due, asked) in enumerate(arrivals(trace, rate, window))
    ]
    counted = {
        r.index for r in requests if window.warm_seconds <= r.due_seconds <= window.run_seconds
    }
    if not counted:
        raise ValueError(f"no request is due in {window} at {rate:.3g}/s: the run is too short")

    def is_over(driver: Driver) -> bool:
        if driver.elapsed_seconds >= window.longest_seconds:
            return True
        return driver.elapsed_seconds > window.run_seconds and counted <= {
            each.index for each in driver.finished
        }

    driver = worker.serve(requests, float("inf"), is_over)
    # One that was not answered has waited until now, at the least.
    latencies = [
        driver.elapsed_seconds - each.due_seconds
        if each.latency_seconds is None
        else each.latency_seconds
        for each in requests
        if each.index in counted
    ]
    num_answered = len(counted & {each.index for each in driver.finished})
    is_saturated = num_answered < len(counted) or is_growing(latencies)
    point = point_of(rate, latencies, is_saturated=is_saturated)
    say(
        f"         {rate:.2f}/s: mean {point.mean_seconds:.2f} s, P99 {point.p99_seconds:.2f} s, "
        f"{num_answered} of {len(counted)} answered, "
        f"{driver.num_tokens / driver.elapsed_seconds:.0f} tokens/s"
        + (", saturated" if is_saturated else "")
    )
    return point


def is_growing(latencies: Sequence[float]) -> bool:
    """Whether latencies, in order of arrival, grow so much that they have no mean of their own."""
    if len(latencies) < _ENOUGH_REQUESTS:
        return False
    halves = np.array_split(np.array(latencies), 2)
    return float(halves[1].mean()) > _GROWTH * float(halves[0].mean())


def climb(
    first_rate: float,
    run: Callable[[float], Point],
    budget: Budget,
    run_seconds: float,
    enough_mean_seconds: float,
) -> Iterator[Point]:
    """Points at rising rates: 40 % more each time, then between what held and what did not.

    Args:
        run_seconds: of one run; none is begun with less time left.
        enough_mean_seconds: a rate with this mean latency counts as too high, too.
    """
    low, high, rate = 0.0, float("inf"), first_rate
    while budget.left_seconds > run_seconds:
        point = run(rate)
        yield point
        if point.is_saturated or point.mean_seconds > enough_mean_seconds:
            high = rate
        else:
            low = rate
        if high == float("inf"):
            rate = _STEP * low
        elif low:
            rate = (low * high) ** 0.5
        else:
            rate = high / 2
        if high < (1 + _CLOSEST) * low or rate < _LEAST_SHARE * first_rate:
            return
