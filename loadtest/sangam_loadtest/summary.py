"""What a run's records say in numbers: latencies by part, rates, failures, right answers.

Decides what is counted: everything but the warm-up and what the user interrupted. Measured and
simulated records are summed up alike. Called by ``run``, ``capacity`` and ``report``; shown by
``show``.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sangam_loadtest.client.health import ClientHealth
from sangam_loadtest.client.open_loop import INTERRUPTED
from sangam_loadtest.records import RequestRecord

METRICS = {
    "latency": "latency_seconds",
    "first_token": "first_token_seconds",
    "queueing": "queueing_seconds",
    "prefill_queueing": "prefill_queueing_seconds",
    "decode_queueing": "decode_queueing_seconds",
    "prefill": "prefill_seconds",
    "decode": "decode_seconds",
    "transfer": "transfer_seconds",
}
"""Metric by its short name, as objectives and tables have it: field of a record."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A metric over the requests that have it, in seconds; percentiles interpolate linearly."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution":
        """The distribution of at least one value."""
        array = np.array(values, dtype=np.float64)
        p50, p90, p99 = (float(value) for value in np.percentile(array, (50, 90, 99)))
        return cls(len(values), float(array.mean()), p50, p90, p99, float(array.max()))


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. Warm-up and interrupted requests are only counted.

    Attributes:
        distributions: by short name (``METRICS``); a metric that no request has is left out.
        errors: failed requests by kind. error_messages: the first message of each kind.
        offered_rate: requests due a second, over the counted requests' due times.
        completed_rate: answers a second, from the first counted due time to the last end.
        output_tokens_rate: answer tokens a second over the same time.
        accuracy: share of right answers among those whose answer is known; None without such.
        health: how the client did; None for a simulation.
    """

    num_requests: int
    num_completed: int
    num_warmup: int
    num_interrupted: int
    errors: dict[str, int]
    error_messages: dict[str, str]
    distributions: dict[str, Distribution]
    offered_rate: float | None
    completed_rate: float | None
    output_tokens_rate: float | None
    num_checked_answers: int
    accuracy: float | None
    accuracy_of_task: dict[str, float]
    num_block_retries: int
    health: ClientHealth | None = None
    complaints: list[str] = field(default_factory=list)

    @property
    def failures(self) -> str:
        """What failed, by kind, each with its first message."""
        kinds = (
            f"{count} x {kind} ({self.error_messages.get(kind, 'no message')})"
            for kind, count in self.errors.items()
        )
        return "; ".join(kinds)

    @property
    def num_failed(self) -> int:
        """Counted requests without an answer."""
        return sum(self.errors.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        return asdict(self)


def summarise(records: Iterable[RequestRecord], health: ClientHealth | None = None) -> Summary:
    """Sum up a run."""
    everything = list(records)
    sent = [r for r in everything if r.error != INTERRUPTED]
    counted = [r for r in sent if not r.is_warmup]
    failed = [r for r in counted if r.error is not None]
    answered = [r for r in counted if r.error is None]
    seconds = _span_seconds(counted, answered)
    checked = [r for r in answered if r.is_right is not None]
    return Summary(
        num_requests=len(counted),
        num_completed=len(answered),
        num_warmup=len(sent) - len(counted),
        num_interrupted=len(everything) - len(sent),
        errors=dict(Counter(r.error for r in failed if r.error is not None).most_common()),
        error_messages=_first_messages(failed),
        distributions=_distributions(answered),
        offered_rate=_offered_rate(counted),
        completed_rate=len(answered) / seconds if seconds else None,
        output_tokens_rate=sum(r.output_tokens for r in answered) / seconds if seconds else None,
        num_checked_answers=len(checked),
        accuracy=_share_right(checked) if checked else None,
        accuracy_of_task={
            task: _share_right([r for r in checked if r.task == task])
            for task in sorted({r.task for r in checked if r.task is not None})
        },
        num_block_retries=sum(r.num_retries or 0 for r in answered),
        health=health,
        complaints=health.complaints() if health else [],
    )


def _first_messages(failed: Sequence[RequestRecord]) -> dict[str, str]:
    found: dict[str, str] = {}
    for record in failed:
        if record.error and record.error_message:
            found.setdefault(record.error, record.error_message)
    return found


def _distributions(answered: Sequence[RequestRecord]) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    for name, attribute in METRICS.items():
        values = [v for r in answered if (v := getattr(r, attribute)) is not None]
        if values:
            found[name] = Distribution.of(values)
    return found


def _span_seconds(counted: Sequence[RequestRecord], answered: Sequence[RequestRecord]) -> float:
    """From the first counted request's due time to the last answer's end."""
    if not answered:
        return 0.0
    last = max(r.scheduled_seconds + (r.latency_seconds or 0.0) for r in answered)
    return last - min(r.scheduled_seconds for r in counted)


def _offered_rate(counted: Sequence[RequestRecord]) -> float | None:
    if len(counted) < 2:
        return None
    due = [r.scheduled_seconds for r in counted]
    span = max(due) - min(due)
    return (len(due) - 1) / span if span > 0 else None


def _share_right(records: Sequence[RequestRecord]) -> float:
    return sum(bool(r.is_right) for r in records) / len(records)
