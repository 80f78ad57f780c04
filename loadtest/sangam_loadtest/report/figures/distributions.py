"""CDFs of prefill queueing, decode queueing and decode time at one rate, a line a configuration.

Decides layout and the scale of the time axis; the rate is chosen by ``grouping.at_one_rate``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from sangam_loadtest.report.drawn import Cell, Drawn, NothingToDraw, Table, listed, rate_told
from sangam_loadtest.report.grouping import Pair, SeriesOf, at_one_rate, pooling_notes
from sangam_loadtest.report.runs import Floats, Run
from sangam_loadtest.report.style import Look, drawing, legend_below, looks_of, panels, save

PARTS = {
    "prefill_queueing_seconds": "prefill queueing",
    "decode_queueing_seconds": "decode queueing",
    "decode_seconds": "decode",
}
"""Time by field of a record."""
_UNSPLIT = {"queueing_seconds": "queueing", "decode_seconds": "decode"}
_PANEL_INCHES = (3.6, 2.45)
_LINEAR_SECONDS = 0.1
_LOG_RATIO = 10.0
_MARK_EVERY = 0.16  # of the panel's diagonal, along the curve


def queueing_and_decode_cdfs(
    runs: Sequence[Run], path: Path, *, rates: Sequence[float] = ()
) -> Drawn:
    """Draws the share of requests whose queueing or decode time is at most so long.

    Args:
        rates: see ``grouping.at_one_rate``.

    Raises:
        NothingToDraw: no run has such times at such a rate.
    """
    parts = _parts_of(runs)
    timed = [run for run in runs if any(len(run.records.values(name)) for name in parts)]
    facets, notes = at_one_rate(timed, rates)
    if not facets:
        raise NothingToDraw(
            " ".join(notes)
            or "No record has queueing or decode times. A Sangam router sends them unless the run "
            "was made with --no-timings; `sangam loadtest simulate` always writes them."
        )
    series_of = SeriesOf(runs)
    looks = looks_of(series_of.all)
    with drawing():
        figure, grid = panels(len(facets), len(parts), _PANEL_INCHES, sharey=True)
        for row, (pair, found) in zip(grid, facets.items(), strict=True):
            for axes, (name, part) in zip(row, parts.items(), strict=True):
                curves = {
                    looks[series_of(run)]: values
                    for run in sorted(found, key=series_of.place)
                    if len(values := np.sort(run.records.values(name)))
                }
                _draw_curves(axes, curves, f"{part} time per request (s)")
            row[0].set_ylabel("share of requests")
            row[0].set_title(f"{pair}, {rate_told(found[0].label.rate)}", loc="left")
        drawn = {series_of(run) for found in facets.values() for run in found}
        legend_below(figure, [looks[s].handle(s.name) for s in series_of.all if s in drawn])
        save(figure, path)
    names = listed([s.name for s in series_of.all if s in drawn])
    if "queueing_seconds" in parts:
        notes += ("These records do not tell prefill queueing from decode queueing.",)
    at = "; ".join(f"{p} at {rate_told(found[0].label.rate)}" for p, found in facets.items())
    return Drawn(
        path,
        "Queueing and decode time",
        "Cumulative distributions over requests, each request's time summed over its blocks: "
        f"{at}. A time axis ends at the highest P99.5; it is logarithmic from "
        f"{_LINEAR_SECONDS:g} s on where configurations differ by over {_LOG_RATIO:g} times.",
        f"Cumulative distributions of {listed(list(parts.values()))} time for {names}; {at}. The "
        "table below has the percentiles.",
        _table(facets, series_of, parts),
        pooling_notes(timed) + notes,
    )


def _parts_of(runs: Sequence[Run]) -> Mapping[str, str]:
    """Queueing in two where any run has it so."""
    is_split = any(len(run.records.values("prefill_queueing_seconds")) for run in runs)
    return PARTS if is_split else _UNSPLIT


def _draw_curves(axes: Axes, curves: Mapping[Look, Floats], label: str) -> None:
    """Draws sorted values as cumulative shares."""
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(label)
    if not curves:
        axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes)
        return
    highest = [max(float(np.quantile(v, 0.995)), 1e-3) for v in curves.values()]
    end = max(highest) * 1.03
    is_log = max(highest) > _LOG_RATIO * max(min(highest), _LINEAR_SECONDS)
    for place, (look, values) in enumerate(curves.items()):
        shares = np.arange(1, len(values) + 1) / len(values)
        # At most a thousand corners: vector formats stay small
        keep = np.unique(np.linspace(0, len(values) - 1, 1000).astype(int))
        axes.plot(
            np.concatenate([values[:1], values[keep]]),
            np.concatenate([[0.0], shares[keep]]),
            **look.line(markevery=(_MARK_EVERY * (place + 0.5) / len(curves), _MARK_EVERY)),
        )
    if is_log:
        axes.set_xscale("symlog", linthresh=_LINEAR_SECONDS, linscale=0.5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    axes.set_xlim(0, end)


def _table(
    facets: Mapping[Pair, Sequence[Run]], series_of: SeriesOf, parts: Mapping[str, str]
) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair, runs in facets.items():
        for name, part in parts.items():
            for run in sorted(runs, key=series_of.place):
                percentiles = (run.percentile(name, percent) for percent in (50, 90, 99))
                rows.append(
                    (
                        pair.model,
                        pair.trace,
                        part,
                        series_of(run).name,
                        run.label.rate,
                        run.mean(name),
                        *percentiles,
                    )
                )
    columns = ("model", "trace", "time", "configuration", "requests/s")
    return Table((*columns, "mean (s)", "P50 (s)", "P90 (s)", "P99 (s)"), tuple(rows))
