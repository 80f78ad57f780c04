"""The figure of a recommendation: each objective's statistic against the rate, by mode.

Decides what is shown (the best of each mode, the bound, the rate asked for); looks are the
report's. Called by the command.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sangam_loadtest.capacity import Objective
from sangam_loadtest.recommend.search import Finalist
from sangam_loadtest.report.axis_cap import mark_handles
from sangam_loadtest.report.lines import Point, draw_lines
from sangam_loadtest.report.style import (
    BLACK,
    DASHES,
    GREY,
    drawing,
    legend_below,
    look,
    panels,
    save,
)

_PANEL_INCHES = ((6.6, 3.2), (4.6, 2.9))  # alone, and beside another
_MAX_COLUMNS = 2
_ROOM = 1.15
_MAX_BOUNDS = 2.5


def draw_capacity(
    finalists: Sequence[Finalist], objectives: Sequence[Objective], title: str, path: Path
) -> None:
    """Draws a panel for each objective, a line for each finalist."""
    num_columns = min(len(objectives), _MAX_COLUMNS)
    num_rows = -(-len(objectives) // num_columns)
    # Dashes over a solid line: a hybrid that never overflows is the same as its static twin.
    looks = {
        finalist.candidate.split: replace(look(place), dashes=DASHES[place])
        for place, finalist in enumerate(finalists)
    }
    names = {finalist.candidate.split: str(finalist.candidate) for finalist in finalists}
    rate = finalists[0].trial.job.rate
    with drawing():
        figure, grid = panels(num_rows, num_columns, _PANEL_INCHES[num_columns - 1])
        cells = [axes for row in grid for axes in row]
        is_any_beyond = False
        for axes, objective in zip(cells, objectives, strict=False):
            lines = {f.candidate.split: _points(f, objective) for f in finalists}
            points = [point for line in lines.values() for point in line]
            drawn = {name: line for name, line in lines.items() if line}
            if drawn:
                cap = _axis_end([point.seconds for point in points], objective.seconds)
                is_any_beyond |= draw_lines(axes, drawn, looks, cap)
            _mark(axes, objective, rate)
        for axes in cells[len(objectives) :]:
            axes.set_axis_off()
        cells[0].set_title(title, loc="left")
        is_any_saturated = any(t.growth for finalist in finalists for t in finalist.curve)
        handles = [looks[split].handle(name) for split, name in names.items()]
        handles += [
            Line2D([], [], color=BLACK, linestyle="--", label="objective"),
            Line2D([], [], color=GREY, linestyle=":", label="rate asked for"),
        ]
        legend_below(figure, handles + mark_handles(is_any_saturated, is_any_beyond))
        save(figure, path)


def _points(finalist: Finalist, objective: Objective) -> list[Point]:
    found = []
    for trial in finalist.curve:
        value = objective.value(trial.summary.distributions)
        if value is not None:
            found.append(Point(trial.job.rate, value, trial.growth is not None))
    return found


def _axis_end(values: Sequence[float], bound: float) -> float:
    """Beyond the bound and the highest value, but no further than shows the bound well."""
    return min(_ROOM * max(*values, bound), _MAX_BOUNDS * bound)


def _mark(axes: Axes, objective: Objective, rate: float) -> None:
    axes.axhline(objective.seconds, color=BLACK, linestyle="--", linewidth=1.2)
    axes.axvline(rate, color=GREY, linestyle=":", linewidth=1.5)
    statistic = objective.statistic
    shown = statistic if statistic in ("mean", "max") else statistic.upper()
    axes.set_ylabel(f"{shown} {objective.metric.replace('_', ' ')} (s)")
    axes.set_xlabel("request rate (requests/s)")
    axes.set_xlim(left=0)
