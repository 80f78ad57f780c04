"""Iterations of a request against the length of its output, a panel a model.

Decides how many requests are drawn one by one (few) or counted in hexagons (many), and the bins of
the median line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator

from sangam_loadtest.report.drawn import Cell, Drawn, NothingToDraw, Table, listed
from sangam_loadtest.report.grouping import shown
from sangam_loadtest.report.runs import Floats, Run
from sangam_loadtest.report.style import BLUE, VERMILLION, drawing, legend_below, panels, save

_PANEL_INCHES = (4.6, 3.1)
_MAX_COLUMNS = 2
_MAX_SCATTERED = 600
_NUM_BINS = 16
_MIN_IN_BIN = 5
# Without its lightest fifth, which white paper swallows
_BLUES = ListedColormap(colormaps["Blues"](np.linspace(0.22, 1.0, 200)))
_MEDIAN: dict[str, Any] = {"color": VERMILLION, "marker": "o", "markersize": 4, "linestyle": "-"}


@dataclass(frozen=True, slots=True)
class Bin:
    """Requests of about one output length."""

    first_tokens: int
    last_tokens: int
    num_requests: int
    middle_tokens: float
    quartiles: tuple[float, float, float]


def iterations_against_output(runs: Sequence[Run], path: Path) -> Drawn:
    """Draws the number of passes against output tokens, with binned median and quartiles.

    Raises:
        NothingToDraw: no record has its number of steps.
    """
    facets = _requests_of(runs)
    if not facets:
        raise NothingToDraw(
            "No record has num_steps. A Sangam router sends it unless the run was made with "
            "--no-timings; `sangam loadtest simulate` always writes it."
        )
    bins = {name: bins_of(output, steps) for name, (output, steps) in facets.items()}
    with drawing():
        num_columns = min(len(facets), _MAX_COLUMNS)
        num_rows = -(-len(facets) // num_columns)
        figure, grid = panels(num_rows, num_columns, _PANEL_INCHES)
        cells = [axes for row in grid for axes in row]
        for axes in cells[len(facets) :]:
            axes.set_axis_off()
        for axes, (name, (output, steps)) in zip(cells, facets.items(), strict=False):
            _draw(axes, output, steps, bins[name])
            axes.set_title(f"{name} ({len(output):,} requests)", loc="left")
        legend_below(figure, _handles())
        save(figure, path)
    return Drawn(
        path,
        "Iterations against output length",
        "Iterations (passes whose commits counted, prefills included) of a request against the "
        "tokens of its output. Axes end at the 99.8th percentiles.",
        f"Density of iterations against output tokens with the binned median, for "
        f"{listed(list(facets))}. The table below has the bins.",
        _table(bins),
    )


def _requests_of(runs: Sequence[Run]) -> dict[str, tuple[Floats, Floats]]:
    """Output tokens and steps of every request, by model (and kind, if there are both)."""
    has_kinds = len({run.label.kind for run in runs}) > 1
    found: dict[str, list[tuple[Floats, Floats]]] = {}
    for run in runs:
        output, steps = run.records.answered("output_tokens"), run.records.answered("num_steps")
        known = ~np.isnan(steps)
        if known.any():
            name = shown(run.label.model) or "unknown model"
            name += f", {run.label.kind or 'unknown kind'}" if has_kinds else ""
            found.setdefault(name, []).append((output[known], steps[known]))
    return {
        name: (np.concatenate([o for o, _ in parts]), np.concatenate([s for _, s in parts]))
        for name, parts in found.items()
    }


def bins_of(output: Floats, steps: Floats) -> list[Bin]:
    """Sixteen equal bins up to the 99.5th percentile of length; those of five requests or more."""
    longest = float(np.percentile(output, 99.5))
    width = max(1, int(np.ceil(longest / _NUM_BINS)))
    found = []
    for first in range(1, int(longest) + 1, width):
        inside = (output >= first) & (output < first + width)
        if inside.sum() >= _MIN_IN_BIN:
            low, median, high = (float(q) for q in np.percentile(steps[inside], (25, 50, 75)))
            middle = float(np.median(output[inside]))
            quartiles = (low, median, high)
            found.append(Bin(first, first + width - 1, int(inside.sum()), middle, quartiles))
    return found


def _draw(axes: Axes, output: Floats, steps: Floats, bins: Sequence[Bin]) -> None:
    right, top = float(np.percentile(output, 99.8)), float(np.percentile(steps, 99.8))
    if len(output) <= _MAX_SCATTERED:
        axes.plot(output, steps, ".", color=BLUE, alpha=0.45, markersize=6, markeredgewidth=0)
    else:
        drawn = axes.hexbin(
            output,
            steps,
            gridsize=(56, 34),
            extent=(0, right, 0, top),
            bins="log",
            mincnt=1,
            cmap=_BLUES,
            linewidths=0.1,
        )
        figure = axes.get_figure()
        assert figure is not None
        bar = figure.colorbar(
            drawn,
            ax=axes,
            label="requests in a hexagon",
            pad=0.01,
            aspect=30,
            ticks=LogLocator(subs=(1.0, 2.0, 5.0)),
            format=FuncFormatter(lambda count, _: f"{count:,.0f}"),
        )
        bar.minorticks_off()
    middles = [b.middle_tokens for b in bins]
    if bins:
        low, median, high = zip(*(b.quartiles for b in bins), strict=True)
        axes.fill_between(middles, low, high, color=VERMILLION, alpha=0.22, linewidth=0)
        axes.plot(middles, median, **_MEDIAN)
    axes.set_xlim(0, right)
    axes.set_ylim(0, top)
    axes.set_xlabel("output length (tokens)")
    axes.set_ylabel("iterations")


def _handles() -> list[Line2D | Patch]:
    return [
        Line2D([], [], label="median of a bin", **_MEDIAN),
        Patch(facecolor=VERMILLION, alpha=0.22, label="P25 to P75"),
    ]


def _table(bins: dict[str, list[Bin]]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            f"{b.first_tokens} to {b.last_tokens}",
            b.num_requests,
            *b.quartiles,
            b.middle_tokens / b.quartiles[1] if b.quartiles[1] else None,
        )
        for name, of_model in bins.items()
        for b in of_model
    ]
    columns = ("model", "output tokens", "requests", "P25", "median", "P75", "tokens/iteration")
    return Table(columns, tuple(rows))
