"""Latency against request rate: mean and P99, a line a configuration, facets of model and trace.

Decides the layout; which runs form a line is ``grouping``'s, where the axis ends ``axis_cap``'s.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sangam_loadtest.report.axis_cap import mark_handles, mark_notes
from sangam_loadtest.report.drawn import Drawn, NothingToDraw, Table, listed
from sangam_loadtest.report.grouping import Pair, SeriesOf, by_pair, pooled, pooling_notes
from sangam_loadtest.report.lines import STATISTICS, draw_lines, latency, lines_of
from sangam_loadtest.report.runs import Run
from sangam_loadtest.report.style import PAGE_INCHES, drawing, legend_below, looks_of, panels, save

_HEIGHT_INCHES = 2.35
_WIDE_INCHES = (4.6, 2.9)
_MAX_WIDTH_INCHES = 4.2
_MAX_COLUMNS = 4


def latency_against_rate(
    runs: Sequence[Run], path: Path, *, max_seconds: float | None = None
) -> Drawn:
    """Draws mean and P99 latency against rate.

    Args:
        max_seconds: end of the latency axes; None: above the highest run that is not saturated.

    Raises:
        NothingToDraw: no run has both a rate and an answer.
    """
    usable = [run for run in runs if run.label.rate is not None and len(run.latency_seconds)]
    if not usable:
        raise NothingToDraw(
            "No run has a rate and answers. Runs of `sangam loadtest run` and `simulate` have "
            "both; give several rates of each configuration."
        )
    series_of = SeriesOf(usable)
    facets = by_pair(pooled(usable))
    looks = looks_of(series_of.all)
    with drawing():
        figure, cells = _layout(list(facets))
        is_any_beyond = False
        for (pair, statistic), axes in cells.items():
            lines = lines_of(facets[pair], statistic, series_of, lambda run: run.label.rate)
            is_any_beyond |= draw_lines(axes, lines, looks, max_seconds)
        is_any_saturated = any(run.saturation for found in facets.values() for run in found)
        handles = [looks[series].handle(series.name) for series in series_of.all]
        legend_below(figure, handles + mark_handles(is_any_saturated, is_any_beyond))
        save(figure, path)
    names, pairs = listed([s.name for s in series_of.all]), "; ".join(map(str, facets))
    return Drawn(
        path,
        "Latency against request rate",
        "End-to-end latency, mean and 99th percentile of a run's requests, against the nominal "
        "request rate.",
        f"Lines of mean and P99 latency in seconds against requests a second, for {names}; "
        f"{pairs}. The table below has every point.",
        _table(facets, series_of),
        pooling_notes(usable) + mark_notes(is_any_saturated, is_any_beyond),
    )


def _layout(pairs: Sequence[Pair]) -> tuple[Figure, dict[tuple[Pair, str], Axes]]:
    """One facet: its two panels side by side. More: mean above P99, up to four facets a row."""
    cells: dict[tuple[Pair, str], Axes] = {}
    if len(pairs) == 1:
        figure, grid = panels(1, len(STATISTICS), _WIDE_INCHES)
        for axes, statistic in zip(grid[0], STATISTICS, strict=True):
            cells[pairs[0], statistic] = axes
            axes.set_ylabel(f"{statistic} latency (s)")
        grid[0][0].set_title(str(pairs[0]), loc="left")
    else:
        num_columns = min(len(pairs), _MAX_COLUMNS)
        num_bands = -(-len(pairs) // num_columns)
        width = min(_MAX_WIDTH_INCHES, PAGE_INCHES / num_columns)
        figure, grid = panels(2 * num_bands, num_columns, (width, _HEIGHT_INCHES))
        for place in range(num_bands * num_columns):
            band, column = divmod(place, num_columns)
            for row, statistic in enumerate(STATISTICS):
                axes = grid[2 * band + row][column]
                if place >= len(pairs):
                    axes.set_axis_off()
                    continue
                cells[pairs[place], statistic] = axes
                axes.set_title(str(pairs[place]) if row == 0 else "")
                axes.set_ylabel(f"{statistic} latency (s)" if column == 0 else "")
    for (_, statistic), axes in cells.items():
        is_lowest = len(pairs) == 1 or statistic == STATISTICS[-1]
        axes.set_xlabel("request rate (requests/s)" if is_lowest else "")
    return figure, cells


def _table(facets: Mapping[Pair, Sequence[Run]], series_of: SeriesOf) -> Table:
    rows = [
        (
            pair.model,
            pair.trace,
            series_of(run).name,
            run.label.rate,
            latency(run, "mean"),
            latency(run, "P99"),
            run.saturation or "no",
        )
        for pair, runs in facets.items()
        for run in sorted(runs, key=lambda run: (series_of.place(run), run.label.rate or 0.0))
    ]
    columns = ("model", "trace", "configuration", "requests/s", "mean (s)", "P99 (s)", "saturated")
    return Table(columns, tuple(rows))
