"""What a report knows of a run: its label, its requests' numbers as arrays, its summary.

Decides which numbers of a record a report keeps, which requests count (all but the warm-up and what
the user interrupted), and when a run is called saturated. Reads no file (``loading`` does) and
draws nothing. Made by ``loading`` and, from memory, by whoever has records (``run_of``); read by
the figures.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sangam_core.counted import counted
from sangam_core.errors import SangamError
from sangam_loadtest.client.open_loop import INTERRUPTED
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.run_files import RunLabel

Floats = NDArray[np.float64]

NUMBERS = (
    "scheduled_seconds",
    "prompt_tokens",
    "output_tokens",
    "latency_seconds",
    "first_token_seconds",
    "queueing_seconds",
    "prefill_queueing_seconds",
    "decode_queueing_seconds",
    "prefill_seconds",
    "decode_seconds",
    "transfer_seconds",
    "num_steps",
    "num_retries",
)
"""Fields of a record that a report uses."""

_MIN_JUDGED = 30  # a trend over fewer requests is noise
_GROWTH_PER_SECOND = 0.02
_GROWTH_RATIO = 1.3
_FAILED_SHARE = 0.01


class ReportError(SangamError):
    """A report cannot be made of what was given; names file, line or field, and what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestNumbers:
    """The counted requests of a run, a place in each array a request, in order of their due times.

    Attributes:
        columns: by name of ``NUMBERS``; NaN where a request does not have the number.
        is_answered: whether a request was answered.
        num_warmup: requests that are not counted, being of the warm-up.
        num_interrupted: requests that are not counted, the user having ended the run.
    """

    columns: Mapping[str, Floats]
    is_answered: NDArray[np.bool_]
    num_warmup: int = 0
    num_interrupted: int = 0

    @property
    def num_counted(self) -> int:
        """Requests that count."""
        return len(self.is_answered)

    @property
    def num_answered(self) -> int:
        """Requests that count and were answered."""
        return int(self.is_answered.sum())

    def answered(self, name: str) -> Floats:
        """A number of each answered request, NaN where it does not have it."""
        return self.columns[name][self.is_answered]

    def values(self, name: str) -> Floats:
        """A number over the answered requests that have it."""
        found = self.answered(name)
        return found[~np.isnan(found)]


@dataclass(frozen=True, eq=False)
class Run:
    """One run at one rate.

    Attributes:
        source: where it came from, for messages.
        records: its requests.
        summary: its summary file's content; empty where there is none.
    """

    label: RunLabel
    records: RequestNumbers
    summary: Mapping[str, Any] = field(default_factory=dict)
    source: str = "memory"

    @property
    def latency_seconds(self) -> Floats:
        """Latency of each answered request."""
        return self.records.values("latency_seconds")

    @cached_property
    def saturation(self) -> str | None:
        """Why this run's latencies are no steady state's; None where they may be one.

        Requests that fail (over 1 %), or a queue that never stops growing: by a least-squares line
        through latency over due time it grows by over 0.02 s a second (2 % more arrives than is
        served), and the last third of the requests takes 1.3 times as long as the first. Runs
        of fewer than 30 answers are not judged by their trend.
        """
        num_counted = self.records.num_counted
        failed = num_counted - self.records.num_answered
        if failed > _FAILED_SHARE * num_counted:
            return f"{failed} of {counted(num_counted, 'request')} failed"
        return _growth(self.records)

    def mean(self, name: str) -> float:
        """Mean of a number, NaN where no request has it."""
        values = self.records.values(name)
        return float(values.mean()) if len(values) else float("nan")

    def percentile(self, name: str, percent: float) -> float:
        """Percentile of a number (linear interpolation), NaN where no request has it."""
        values = self.records.values(name)
        return float(np.percentile(values, percent)) if len(values) else float("nan")


def _growth(records: RequestNumbers) -> str | None:
    due, latency = records.answered("scheduled_seconds"), records.answered("latency_seconds")
    known = ~np.isnan(latency)
    due, latency = due[known], latency[known]
    if len(due) < _MIN_JUDGED or due[-1] == due[0]:
        return None
    centred = due - due.mean()
    slope = float(centred @ latency / (centred @ centred))
    third = len(due) // 3
    first, last = float(latency[:third].mean()), float(latency[-third:].mean())
    if slope > _GROWTH_PER_SECOND and last > _GROWTH_RATIO * first:
        return f"the mean latency grows from {first:.3g} s (first third) to {last:.3g} s (last)"
    return None


def numbers_of(entries: Sequence[Mapping[str, Any]]) -> RequestNumbers:
    """Requests' numbers from records as plain data (a JSON object each).

    Raises:
        ValueError, TypeError, KeyError: an entry is no record.
    """
    sent = [entry for entry in entries if entry.get("error") != INTERRUPTED]
    counted = [entry for entry in sent if not entry.get("is_warmup")]
    columns = {
        name: np.array([entry.get(name) for entry in counted], dtype=np.float64) for name in NUMBERS
    }
    answered = np.array([entry.get("error") is None for entry in counted], dtype=np.bool_)
    order = np.argsort(columns["scheduled_seconds"], kind="stable")
    return RequestNumbers(
        {name: column[order] for name, column in columns.items()},
        answered[order],
        num_warmup=len(sent) - len(counted),
        num_interrupted=len(entries) - len(sent),
    )


def run_of(
    label: RunLabel,
    records: Iterable[RequestRecord],
    summary: Mapping[str, Any] | None = None,
    source: str = "memory",
) -> Run:
    """A run from records in memory.

    Raises:
        ReportError: no record counts.
    """
    entries = [
        {name: getattr(record, name) for name in (*NUMBERS, "error", "is_warmup")}
        for record in records
    ]
    return checked(Run(label, numbers_of(entries), summary or {}, source))


def checked(run: Run) -> Run:
    """The run, if a figure can be drawn of it.

    Raises:
        ReportError: no record counts, or a latency is negative or infinite.
    """
    records = run.records
    if not records.num_counted:
        why = "it is empty"
        if records.num_warmup or records.num_interrupted:
            why = (
                f"{records.num_warmup} are of the warm-up, {records.num_interrupted} were "
                "interrupted; run for longer than --warmup"
            )
        raise ReportError(f"{run.source}: no request to report on: {why}")
    latency = run.latency_seconds
    if len(latency) and not (latency.min() >= 0 and np.isfinite(latency.max())):
        raise ReportError(f"{run.source}: latency_seconds must be finite and not negative")
    return run
