"""What is asked of a system, real or simulated: which requests, when each is due, what counts.

Decides how long a run is and what is warm-up; not where requests go (``run``, the simulator).
Called by ``run``, ``capacity`` and the simulator.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from sangam_core.errors import ConfigurationError
from sangam_loadtest.arrivals import Arrivals, schedule
from sangam_loadtest.traces.request import TraceRequest
from sangam_loadtest.traces.source import TraceSpec, take_requests

MAX_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class Due:
    """A request and when it is due, seconds after the start."""

    index: int
    at_seconds: float
    request: TraceRequest
    is_warmup: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """A trace's requests at a process's times.

    Attributes:
        num_requests: counted ones, warm-up not included; None: as many as ``duration_seconds``
            holds at the mean rate.
        warmup_seconds: requests due earlier than this are sent but not counted.
    """

    trace: TraceSpec
    arrivals: Arrivals
    num_requests: int | None = None
    duration_seconds: float | None = None
    warmup_seconds: float = 0.0

    def __post_init__(self) -> None:
        if (self.num_requests is None) == (self.duration_seconds is None):
            raise ConfigurationError("say either how many requests or for how long, not both")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigurationError("there must be at least one request")
        if self.duration_seconds is not None and self.duration_seconds <= 0:
            raise ConfigurationError("the duration must be positive")
        if self.warmup_seconds < 0:
            raise ConfigurationError("the warm-up cannot be negative")

    @property
    def true_rate(self) -> float | None:
        """The true mean rate of arrivals; None where the trace's own times say it."""
        return self.arrivals.true_rate

    def at(self, rate: float) -> "Load":
        """The same requests at another rate."""
        return replace(self, arrivals=replace(self.arrivals, rate=rate))


Take = Callable[[TraceSpec, int], list[TraceRequest]]


def planned(load: Load, take: Take = take_requests) -> list[Due]:
    """Every request of a load with its due time; the same load gives the same plan.

    Not inside a running event loop (tokenising a text trace needs one of its own).

    Args:
        take: reads the trace; whoever plans one trace many times keeps its requests.

    Raises:
        ConfigurationError: number or duration cannot be had of this trace.
        TraceError: the trace cannot be read or is too short.
    """
    count = _count(load)
    requests = take(load.trace, count)
    times = schedule(load.arrivals, count, [request.arrival_seconds for request in requests])
    plan = [
        Due(index, at, request, is_warmup=at < load.warmup_seconds)
        for index, (at, request) in enumerate(zip(times.tolist(), requests, strict=True))
    ]
    if all(due.is_warmup for due in plan):
        raise ConfigurationError(
            f"every request is due within the warm-up of {load.warmup_seconds:g} s; "
            "send more, or warm up for less long"
        )
    return plan


def _count(load: Load) -> int:
    rate = load.true_rate
    if rate is None:
        if load.num_requests is None:
            raise ConfigurationError(
                "a trace's own times need a number of requests (--requests), or a rate to scale to"
            )
        return load.num_requests
    if load.num_requests is not None:
        count = load.num_requests + ceil(rate * load.warmup_seconds)
    else:
        assert load.duration_seconds is not None  # __post_init__ holds it
        count = ceil(rate * (load.warmup_seconds + load.duration_seconds))
    if count > MAX_REQUESTS:
        raise ConfigurationError(f"{count} requests are more than a run can hold ({MAX_REQUESTS})")
    return max(1, count)
