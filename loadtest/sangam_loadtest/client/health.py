"""Whether the client itself was the bottleneck of a run.

Decides what is watched (the event loop's lag, late sends, the processor time of this process) and
from where on a run's numbers are not the server's. Called by ``open_loop``.
"""

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

LATE_SECONDS = 0.05
"""A request sent this much after it was due counts as late. Its latency still counts from when
it was due: the wait is not hidden, but it is the client's."""
MAX_LATE_SHARE = 0.01
MIN_LATE = 5
"""Fewer late requests than this say nothing, however short the run."""
MIN_LAGS = 100
"""Fewer samples than this (two seconds) have no 99th percentile to speak of."""
MAX_LAG_P99_SECONDS = 0.05
MAX_CPU_SHARE = 0.9
_WATCH_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """How the client did.

    Attributes:
        lag_p99_seconds: by how much the event loop overslept, 99th percentile.
        cpu_share: of one core, over the run.
        num_late: requests sent more than ``LATE_SECONDS`` after they were due.
        num_lags: samples of the lag.
    """

    num_sent: int
    num_late: int
    worst_late_seconds: float
    lag_p99_seconds: float
    lag_max_seconds: float
    cpu_share: float
    peak_in_flight: int
    num_lags: int

    def complaints(self) -> list[str]:
        """Why the numbers may be the client's rather than the server's; empty if they are not."""
        found = []
        if self.num_late > max(MIN_LATE, MAX_LATE_SHARE * self.num_sent):
            found.append(
                f"{self.num_late} of {self.num_sent} requests were sent over "
                f"{LATE_SECONDS * 1000:.0f} ms late (worst {self.worst_late_seconds:.2f} s)"
            )
        if self.num_lags >= MIN_LAGS and self.lag_p99_seconds > MAX_LAG_P99_SECONDS:
            found.append(f"the event loop lagged {self.lag_p99_seconds * 1000:.0f} ms (P99)")
        if self.cpu_share > MAX_CPU_SHARE:
            found.append(f"the client used {self.cpu_share:.0%} of a core")
        return found


@dataclass(slots=True)
class HealthWatch:
    """Collects during a run; ``watch`` runs as a task beside it."""

    num_sent: int = 0
    num_late: int = 0
    worst_late_seconds: float = 0.0
    in_flight: int = 0
    peak_in_flight: int = 0
    _lags: list[float] = field(default_factory=list)
    _wall_start: float = field(default_factory=time.monotonic)
    _cpu_start: float = field(default_factory=time.process_time)

    async def watch(self) -> None:
        """Measure the loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_WATCH_SECONDS)
            self._lags.append(loop.time() - before - _WATCH_SECONDS)

    def sent(self, late_seconds: float) -> None:
        """A request goes out."""
        self.num_sent += 1
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        self.worst_late_seconds = max(self.worst_late_seconds, late_seconds)
        self.num_late += late_seconds > LATE_SECONDS

    def ended(self) -> None:
        """A request has an end, whichever."""
        self.in_flight -= 1

    def health(self) -> ClientHealth:
        """What was seen so far."""
        lags = np.array(self._lags or [0.0])
        wall = time.monotonic() - self._wall_start
        return ClientHealth(
            num_sent=self.num_sent,
            num_late=self.num_late,
            worst_late_seconds=self.worst_late_seconds,
            lag_p99_seconds=float(np.percentile(lags, 99)),
            lag_max_seconds=float(lags.max()),
            cpu_share=(time.process_time() - self._cpu_start) / wall if wall > 0 else 0.0,
            peak_in_flight=self.peak_in_flight,
            num_lags=len(self._lags),
        )
