"""Every run in one row. Decides which numbers; called by the ``report`` command and the page."""

from collections.abc import Sequence

from sangam_loadtest.report.drawn import UNKNOWN, Cell, Table
from sangam_loadtest.report.grouping import SeriesOf, by_pair
from sangam_loadtest.report.runs import Run

_COLUMNS = (
    *("model", "trace", "configuration", "system", "τ (tokens)", "kind", "requests/s"),
    *(
        "true requests/s",
        "answered",
        "failed",
        "mean (s)",
        "P50 (s)",
        "P90 (s)",
        "P99 (s)",
        "prefill queueing (s)",
    ),
    *("decode queueing (s)", "queueing (s)", "prefill (s)", "decode (s)", "transfer (s)"),
    *("answered/s", "tokens/s", "saturated"),
)
_MEANS = (
    "prefill_queueing_seconds",
    "decode_queueing_seconds",
    "queueing_seconds",
    "prefill_seconds",
    "decode_seconds",
    "transfer_seconds",
)


def summary_table(runs: Sequence[Run]) -> Table:
    """A row a run, in the order of the figures. Parts of the latency are means.

    Columns that no run has anything for are left out.
    """
    series_of = SeriesOf(runs)
    rows = [
        _row(run)
        for found in by_pair(runs).values()
        for run in sorted(found, key=lambda run: (series_of.place(run), run.label.rate or 0.0))
    ]
    table = Table(_COLUMNS, tuple(rows))
    known = [n for n in range(len(_COLUMNS)) if any(text[n] != UNKNOWN for text in table.texts())]
    return Table(
        tuple(_COLUMNS[n] for n in known), tuple(tuple(row[n] for n in known) for row in rows)
    )


def _row(run: Run) -> tuple[Cell, ...]:
    label, records = run.label, run.records
    seconds = _span_seconds(run)
    tokens = float(records.answered("output_tokens").sum())
    return (
        label.model,
        label.trace,
        label.configuration,
        label.system,
        label.tau_tokens,
        label.kind,
        label.rate,
        _other_rate(run),
        records.num_answered,
        records.num_counted - records.num_answered,
        run.mean("latency_seconds"),
        *(run.percentile("latency_seconds", percent) for percent in (50, 90, 99)),
        *(run.mean(name) for name in _MEANS),
        records.num_answered / seconds if seconds else None,
        tokens / seconds if seconds else None,
        run.saturation or "no",
    )


def _other_rate(run: Run) -> float | None:
    """The true rate where it is not the nominal one (the paper's clipped gaps)."""
    true_rate, rate = run.summary.get("true_rate"), run.label.rate
    if not isinstance(true_rate, int | float) or rate is None:
        return None
    return float(true_rate) if abs(true_rate - rate) > 0.001 * rate else None


def _span_seconds(run: Run) -> float:
    """From the first counted request's due time to the last answer's end."""
    if not len(run.latency_seconds):
        return 0.0
    records = run.records
    ends = records.values("scheduled_seconds") + records.answered("latency_seconds")
    return float(ends[ends == ends].max() - records.columns["scheduled_seconds"].min())
