"""Where the time of the mean request and of the P99 request goes, stacked, a bar a configuration.

Decides the parts and what a P99 request is: the mean over the requests ranked around the 99th
percentile of latency (half a percent of all to either side, five at least), since a single
request's parts are an accident.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from sangam_loadtest.report.axis_cap import axis_cap
from sangam_loadtest.report.drawn import Cell, Drawn, NothingToDraw, Table, listed, rate_told, told
from sangam_loadtest.report.grouping import Pair, Series, SeriesOf, at_one_rate, pooling_notes
from sangam_loadtest.report.runs import Floats, Run
from sangam_loadtest.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PAGE_INCHES,
    PURPLE,
    SKY,
    VERMILLION,
    drawing,
    legend_below,
    panels,
    save,
)

PARTS = {
    "queueing": ("queueing_seconds", PURPLE, ".."),
    "prefill queueing": ("prefill_queueing_seconds", ORANGE, "//"),
    "prefill": ("prefill_seconds", VERMILLION, ""),
    "transfer": ("transfer_seconds", GREEN, "xx"),
    "decode queueing": ("decode_queueing_seconds", SKY, "\\\\"),
    "decode": ("decode_seconds", BLUE, ""),
}
"""Field, colour and hatch of each part; ``queueing`` only where a record does not split it."""
REST = "rest"
_REST_LOOK = (GREY, "--")
_REQUESTS = ("mean request", "P99 request")
_P99_HALF_WIDTH = 0.005
_P99_MIN_REQUESTS = 5
_ROUNDING_SECONDS = 1e-5  # records have whole microseconds, of each part
_BAR_INCHES, _AXIS_INCHES = 0.34, 0.8


@dataclass(frozen=True, slots=True)
class Bar:
    """A run in a facet: seconds by part, for the mean and for the P99 request."""

    pair: Pair
    series: Series
    rate: float | None
    is_saturated: bool
    parts: Mapping[str, Mapping[str, float]]

    @property
    def name(self) -> str:
        """As the axis has it."""
        return f"{self.series.name} (saturated)" if self.is_saturated else self.series.name


def latency_breakdown(runs: Sequence[Run], path: Path, *, rates: Sequence[float] = ()) -> Drawn:
    """Draws the parts of the mean and of the P99 request as stacked bars.

    Args:
        rates: see ``grouping.at_one_rate``.

    Raises:
        NothingToDraw: no run has the parts of its latencies at such a rate.
    """
    timed = [run for run in runs if len(run.records.values("decode_seconds"))]
    facets, notes = at_one_rate(timed, rates)
    if not facets:
        raise NothingToDraw(
            " ".join(notes)
            or "No record has the parts of its latency. A Sangam router sends them unless the run "
            "was made with --no-timings; `sangam loadtest simulate` always writes them."
        )
    bars = _bars_of(facets, SeriesOf(runs))
    used = [part for part in (*PARTS, REST) if any(part in b.parts[_REQUESTS[0]] for b in bars)]
    with drawing():
        is_any_cut = _draw(bars, used, path)
    notes = pooling_notes(timed) + notes
    if is_any_cut:
        notes += ("A bar that ends in ▸ is cut at the end of the axis; its sum is beside it.",)
    at = "; ".join(f"{p} at {rate_told(of[0].label.rate)}" for p, of in facets.items())
    names = listed(list(dict.fromkeys(bar.series.name for bar in bars)))
    return Drawn(
        path,
        "Where the time goes",
        "Parts of the latency of the mean request and of the P99 request (the mean over the "
        f"requests around the 99th percentile): {at}. Rest: what no part explains (network, "
        "router, text).",
        f"Stacked bars of {listed(used)}, for {names}; {at}. The table below has every part.",
        _table(bars, used),
        notes,
    )


def _bars_of(facets: Mapping[Pair, Sequence[Run]], series_of: SeriesOf) -> list[Bar]:
    return [
        Bar(
            pair,
            series_of(run),
            run.label.rate,
            run.saturation is not None,
            {what: parts_of(run, what) for what in _REQUESTS},
        )
        for pair, runs in facets.items()
        for run in sorted(runs, key=series_of.place)
    ]


def parts_of(run: Run, what: str) -> dict[str, float]:
    """Seconds of each part of a run's mean or P99 request, by name.

    What no record has is left out; ``rest`` is the latency that no part explains (network, router,
    text), and is not below 0 where parts overlap.
    """
    records = run.records
    latency = records.answered("latency_seconds")
    which = np.flatnonzero(~np.isnan(latency))
    if what != _REQUESTS[0]:
        which = which[_around_p99(latency[which])]
    columns = {name: records.answered(field)[which] for name, (field, _, _) in PARTS.items()}
    if not np.isnan(columns["prefill queueing"]).all():
        del columns["queueing"]
    parts = {
        name: float(np.nanmean(column))
        for name, column in columns.items()
        if not np.isnan(column).all()
    }
    rest = float(latency[which].mean()) - sum(parts.values())
    return {**parts, REST: rest if rest > _ROUNDING_SECONDS else 0.0}


def _around_p99(latency: Floats) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Places of the requests around the 99th percentile."""
    count = len(latency)
    order = np.argsort(latency, kind="stable")
    middle = 0.99 * (count - 1)
    half = max(_P99_HALF_WIDTH * count, (_P99_MIN_REQUESTS - 1) / 2)
    first = max(0, min(round(middle - half), count - _P99_MIN_REQUESTS))
    found: np.ndarray[tuple[int], np.dtype[np.intp]] = order[first : round(middle + half) + 1]
    return found


def _draw(bars: Sequence[Bar], used: Sequence[str], path: Path) -> bool:
    """Draws and saves the figure; returns whether a bar is cut."""
    pairs = list(dict.fromkeys(bar.pair for bar in bars))
    of_pair = {pair: [bar for bar in bars if bar.pair == pair] for pair in pairs}
    heights = [_AXIS_INCHES + _BAR_INCHES * len(found) for found in of_pair.values()]
    size = (PAGE_INCHES / len(_REQUESTS), sum(heights) / len(heights))
    figure, grid = panels(len(pairs), len(_REQUESTS), size, height_ratios=heights)
    is_any_cut = False
    for row, (pair, found) in zip(grid, of_pair.items(), strict=True):
        for axes, what in zip(row, _REQUESTS, strict=True):
            is_any_cut |= _draw_bars(axes, found, what)
            axes.set_xlabel(f"latency of the {what} (s)")
        row[1].tick_params(labelleft=False)
        row[0].set_title(f"{pair}, {rate_told(found[0].rate)}", loc="left")
    legend_below(figure, [_patch(part) for part in used])
    save(figure, path)
    return is_any_cut


def _draw_bars(axes: Axes, bars: Sequence[Bar], what: str) -> bool:
    """Draws a bar a run, first on top, with its sum; returns whether one is cut."""
    totals = [sum(bar.parts[what].values()) for bar in bars]
    cap = axis_cap(totals, [bar.is_saturated for bar in bars])
    end = cap if cap is not None else max(totals) or 1.0
    for place, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        _stack(axes, place, bar.parts[what], end)
        axes.annotate(
            f"▸ {told(total)} s" if total > end else f"{told(total)} s",
            (min(total, end), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, end * 1.16)
    axes.grid(visible=False, axis="y")
    return cap is not None


def _stack(axes: Axes, place: int, parts: Mapping[str, float], end: float) -> None:
    """Draws the parts of a bar one after the other, as far as the axis goes."""
    left = 0.0
    for part, seconds in parts.items():
        color, hatch = _look(part)
        width = max(0.0, min(seconds, end - left))
        axes.barh(
            place,
            width,
            left=left,
            height=0.68,
            color=color,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.6,
        )
        left += width


def _look(part: str) -> tuple[str, str]:
    return _REST_LOOK if part == REST else PARTS[part][1:]


def _patch(part: str) -> Patch:
    color, hatch = _look(part)
    return Patch(facecolor=color, hatch=hatch, edgecolor="white", label=part)


def _table(bars: Sequence[Bar], used: Sequence[str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for what in _REQUESTS:
        for bar in bars:
            parts = bar.parts[what]
            total = sum(parts.values())
            names = (bar.pair.model, bar.pair.trace, what, bar.series.name)
            rows.append((*names, bar.rate, total, *(parts.get(part) for part in used)))
    columns = ("model", "trace", "request", "configuration", "requests/s", "latency (s)")
    return Table((*columns, *(f"{part} (s)" for part in used)), tuple(rows))
