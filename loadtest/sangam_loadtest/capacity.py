"""The highest rate at which objectives hold: doubling until they do not, then bisection.

Decides which rates are probed and what a probe's result means; how a rate is probed (a server, the
simulator) is the caller's. Probes that are known already are not made again, which is how an
interrupted search goes on. Called by the ``capacity`` command and by the simulator's sweeps.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from sangam_core.errors import ConfigurationError, SangamError
from sangam_loadtest.client.health import MAX_CPU_SHARE
from sangam_loadtest.summary import METRICS, Distribution, Summary

_STATISTICS = ("mean", "p50", "p90", "p99", "max")
_MATERIAL_SHARE = 0.05
"""Of the strictest objective: a lag of the client below this does not change what is found."""
_REFUSED_SHARE = 0.95
"""Of a probe's requests: with so many refused, what is asked is wrong and not the rate."""
_MENDED_BY_A_LOWER_RATE = ("http_408", "http_429")
_OBJECTIVE = re.compile(r"(?:(\w+)\.)?(\w+)\s*<=\s*([0-9.]+)\s*s?")


class RequestsRefused(SangamError):
    """The server refuses what is asked, at any rate."""


class ClientTooSlow(SangamError):
    """A probe's numbers are the client's own, so the search cannot go on from here."""


@dataclass(frozen=True, slots=True)
class Objective:
    """An upper bound, in seconds, on one statistic of one metric."""

    metric: str
    statistic: str
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """``p99<=20``, or ``first_token.mean<=3``; the metric is the latency where none is named.

        Raises:
            ConfigurationError: it is not of this form.
        """
        match = _OBJECTIVE.fullmatch(text.strip())
        try:
            if match is None:
                raise ValueError(text)
            metric, statistic, seconds = match[1] or "latency", match[2], float(match[3])
        except ValueError:
            raise ConfigurationError(
                f"objective {text!r}: must look like 'mean<=7' or 'first_token.p99<=3'"
            ) from None
        if metric not in METRICS or statistic not in _STATISTICS or seconds <= 0:
            raise ConfigurationError(
                f"objective {text!r}: a metric is one of {', '.join(METRICS)}, a statistic one of "
                f"{', '.join(_STATISTICS)}, the bound positive seconds"
            )
        return cls(metric, statistic, seconds)

    def value(self, distributions: Mapping[str, Distribution]) -> float | None:
        """The statistic; None where no request has the metric."""
        found = distributions.get(self.metric)
        return None if found is None else float(getattr(found, self.statistic))

    def __str__(self) -> str:
        return f"{self.metric}.{self.statistic}<={self.seconds:g}"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one rate gave.

    Attributes:
        values: by objective; None where no request has the metric.
        violations: what does not hold, in words; empty where the rate holds.
    """

    rate: float
    values: dict[str, float | None]
    num_requests: int
    num_failed: int
    violations: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether every objective holds at this rate."""
        return not self.violations


Probe = Callable[[float], Summary]
"""Runs the load at a rate to its end, on an idle server."""


@dataclass(frozen=True, slots=True)
class Search:
    """How capacity is looked for.

    Attributes:
        start_rate: first rate, requests a second.
        min_rate, max_rate: the search does not leave them.
        tolerance: the search ends when the highest rate that holds and the lowest that does not
            are within this share of each other.
        max_failed_share: requests that may fail; any more are a violation.
    """

    objectives: tuple[Objective, ...]
    start_rate: float = 1.0
    min_rate: float = 1 / 64
    max_rate: float = 4096.0
    tolerance: float = 0.05
    max_failed_share: float = 0.0

    def __post_init__(self) -> None:
        if not self.objectives:
            raise ConfigurationError("a search for capacity needs at least one objective")
        if not 0 < self.min_rate <= self.start_rate <= self.max_rate:
            raise ConfigurationError("rates must obey 0 < min <= start <= max")
        if not 0.001 <= self.tolerance < 1:
            raise ConfigurationError(f"tolerance must be in [0.001, 1), not {self.tolerance}")
        if not 0 <= self.max_failed_share < 1:
            raise ConfigurationError("the share that may fail must be in [0, 1)")


@dataclass(frozen=True, slots=True)
class Capacity:
    """The result of a search.

    Attributes:
        highest_held: None where not even ``min_rate`` held.
        lowest_violated: None where ``max_rate`` held.
        probes: in the order in which they were made.
    """

    highest_held: float | None
    lowest_violated: float | None
    probes: list[ProbeResult]

    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        return asdict(self)


def judge(search: Search, rate: float, summary: Summary) -> ProbeResult:
    """Hold a probe's summary against the objectives. Failures and time-outs are violations."""
    values = {str(o): o.value(summary.distributions) for o in search.objectives}
    violations = []
    if summary.num_failed > search.max_failed_share * summary.num_requests:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary.errors.items())
        violations.append(f"{summary.num_failed} of {summary.num_requests} failed ({kinds})")
    for objective in search.objectives:
        value = values[str(objective)]
        if value is None:
            violations.append(f"{objective}: no request has this metric")
        elif value > objective.seconds:
            violations.append(f"{objective}: {value:.3f}")
    return ProbeResult(rate, values, summary.num_requests, summary.num_failed, violations)


def _is_client_in_the_way(search: Search, summary: Summary) -> bool:
    """Whether a probe measured the client: it has no core left, or its lag shows in objectives.

    Late requests alone do not end a search: their latency counts from when they were due, so they
    make the capacity that is found smaller, never larger.
    """
    health = summary.health
    if health is None or not summary.complaints:
        return False
    strictest = min(objective.seconds for objective in search.objectives)
    lag_matters = health.lag_p99_seconds > _MATERIAL_SHARE * strictest
    return health.cpu_share > MAX_CPU_SHARE or lag_matters


def _require_no_refusals(summary: Summary) -> None:
    """Stop where no rate can help."""
    num_refused = sum(
        count
        for kind, count in summary.errors.items()
        if kind.startswith("http_4") and kind not in _MENDED_BY_A_LOWER_RATE
    )
    if num_refused and num_refused >= _REFUSED_SHARE * summary.num_requests:
        raise RequestsRefused(
            f"the server refuses the requests, which no rate mends: {summary.failures}"
        )


def find_capacity(
    search: Search,
    probe: Probe,
    known: Sequence[ProbeResult] = (),
    on_probe: Callable[[ProbeResult], None] = lambda result: None,
    verdict: Callable[[Search, float, Summary], ProbeResult] = judge,
) -> Capacity:
    """Search. ``known`` probes of the same search are taken as made; ``on_probe`` gets new ones.

    Args:
        verdict: what a probe's summary means, for whoever knows more of it than ``judge`` does.

    Raises:
        ClientTooSlow: the client was the bottleneck of a probe.
        RequestsRefused: (nearly) all requests of a probe failed with a 4xx that is not of load.
    """
    by_rate = {result.rate: result for result in known}
    probes: list[ProbeResult] = []

    def holds(rate: float) -> bool:
        result = by_rate.get(rate)
        if result is None:
            summary = probe(rate)
            _require_no_refusals(summary)
            if _is_client_in_the_way(search, summary):
                raise ClientTooSlow(
                    f"at {rate:.4g} requests/s the client was the bottleneck: "
                    + "; ".join(summary.complaints)
                )
            result = verdict(search, rate, summary)
            on_probe(result)
        probes.append(result)
        return result.holds

    held, violated = _bracket(search, holds)
    while held is not None and violated is not None and violated > held * (1 + search.tolerance):
        middle = (held + violated) / 2
        if holds(middle):
            held = middle
        else:
            violated = middle
    return Capacity(held, violated, probes)


def _bracket(search: Search, holds: Callable[[float], bool]) -> tuple[float | None, float | None]:
    """The last rate of the doubling that held and the first that did not; halving at the start."""
    rate = search.start_rate
    if holds(rate):
        while rate < search.max_rate:
            higher = min(rate * 2, search.max_rate)
            if not holds(higher):
                return rate, higher
            rate = higher
        return rate, None
    while rate > search.min_rate:
        lower = max(rate / 2, search.min_rate)
        if holds(lower):
            return lower, rate
        rate = lower
    return None, rate
