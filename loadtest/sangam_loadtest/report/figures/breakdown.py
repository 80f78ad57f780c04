"""Where the time of the mean request and of the P99 request goes, stacked, a bar a configuration.

Decides the parts and what a P99 request is: the mean over the requests ranked around the 99th
percentile of latency (half a percent of all to either side, five at least), since a single
request's parts are an accident.
"""

from collections.abc import Mapping, Sequence
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
_BAR_INCHES = 0.34

_Found = Mapping[tuple[Pair, Series], Mapping[str, Mapping[str, float]]]
"""Seconds by part, by request (mean, P99), by bar."""


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
    series_of = SeriesOf(runs)
    found = {
        (pair, series_of(run)): {what: parts_of(run, what) for what in _REQUESTS}
        for pair, of_pair in facets.items()
        for run in sorted(of_pair, key=series_of.place)
    }
    saturated = {
        (pair, series_of(run)): run.saturation is not None
        for pair, of_pair in facets.items()
        for run in of_pair
    }
    num_bars = max(len(of_pair) for of_pair in facets.values())
    with drawing():
        figure, grid = panels(len(facets), 2, (PAGE_INCHES / 2, 0.8 + _BAR_INCHES * num_bars))
        is_any_cut = False
        for row, (pair, of_pair) in zip(grid, facets.items(), strict=True):
            bars = {key: parts for key, parts in found.items() if key[0] == pair}
            for axes, what in zip(row, _REQUESTS, strict=True):
                is_any_cut |= _draw_bars(
                    axes,
                    {key[1]: parts[what] for key, parts in bars.items()},
                    {key[1]: saturated[key] for key in bars},
                )
                axes.set_xlabel(f"latency of the {what} (s)")
            row[1].tick_params(labelleft=False)
            row[0].set_title(f"{pair}, {rate_told(of_pair[0].label.rate)}", loc="left")
        used = [name for name in (*PARTS, REST) if _is_used(name, found)]
        legend_below(figure, [_patch(name) for name in used])
        save(figure, path)
    notes = pooling_notes(timed) + notes
    if is_any_cut:
        notes += ("A bar that ends in ▸ is cut at the end of the axis; its sum is beside it.",)
    at = "; ".join(f"{p} at {rate_told(of[0].label.rate)}" for p, of in facets.items())
    return Drawn(
        path,
        "Where the time goes",
        "Parts of the latency of the mean request and of the P99 request (the mean over the "
        f"requests around the 99th percentile): {at}. Rest: what no part explains (network, "
        "router, text).",
        f"Stacked bars of {listed(used)}, for {listed([s.name for s in series_of.all])}; {at}. The "
        "table below has every part.",
        _table(facets, found, used),
        notes,
    )


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
    return {**parts, REST: max(0.0, float(latency[which].mean()) - sum(parts.values()))}


def _around_p99(latency: Floats) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Places of the requests around the 99th percentile."""
    count = len(latency)
    order = np.argsort(latency, kind="stable")
    middle = 0.99 * (count - 1)
    half = max(_P99_HALF_WIDTH * count, (_P99_MIN_REQUESTS - 1) / 2)
    first = max(0, min(round(middle - half), count - _P99_MIN_REQUESTS))
    found: np.ndarray[tuple[int], np.dtype[np.intp]] = order[first : round(middle + half) + 1]
    return found


def _draw_bars(
    axes: Axes, bars: Mapping[Series, Mapping[str, float]], is_saturated: Mapping[Series, bool]
) -> bool:
    """Draws a bar a series, first on top, with its sum; returns whether one is cut."""
    totals = [sum(parts.values()) for parts in bars.values()]
    cap = axis_cap(totals, [is_saturated[series] for series in bars])
    end = cap if cap is not None else max(totals) or 1.0
    for place, parts in enumerate(bars.values()):
        left = 0.0
        for name, seconds in parts.items():
            color, hatch = _look(name)
            axes.barh(
                place,
                max(0.0, min(seconds, end - left)),
                left=left,
                height=0.68,
                color=color,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.6,
            )
            left = min(end, left + seconds)
        mark = " ▸" if totals[place] > end else ""
        axes.annotate(
            f"{mark} {told(totals[place])} s".strip(),
            (left, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(bars)), [_bar_name(s, is_saturated[s]) for s in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, end * 1.16)
    axes.grid(visible=False, axis="y")
    return cap is not None


def _bar_name(series: Series, is_saturated: bool) -> str:
    return f"{series.name} (saturated)" if is_saturated else series.name


def _look(name: str) -> tuple[str, str]:
    return _REST_LOOK if name == REST else PARTS[name][1:]


def _patch(name: str) -> Patch:
    color, hatch = _look(name)
    return Patch(facecolor=color, hatch=hatch, edgecolor="white", label=name)


def _is_used(name: str, found: _Found) -> bool:
    return any(name in parts for bars in found.values() for parts in bars.values())


def _table(facets: Mapping[Pair, Sequence[Run]], found: _Found, used: Sequence[str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for what in _REQUESTS:
        for (pair, series), bars in found.items():
            parts = bars[what]
            total = sum(parts.values())
            name, rate = series.name, facets[pair][0].label.rate
            told_parts = (parts.get(part) for part in used)
            rows.append((pair.model, pair.trace, what, name, rate, total, *told_parts))
    columns = ("model", "trace", "request", "configuration", "requests/s", "latency (s)")
    return Table((*columns, *(f"{part} (s)" for part in used)), tuple(rows))
