"""Lines of latency with saturated points and points beyond the axis shown as such.

Decides how they are drawn, not what they are of. Called by the figures of rates and of tau.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from matplotlib.axes import Axes

from sangam_loadtest.report.axis_cap import axis_cap, mark_beyond
from sangam_loadtest.report.runs import Run
from sangam_loadtest.report.style import Look

STATISTICS = ("mean", "P99")
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Point:
    """A run in a panel.

    Attributes:
        at: where on the horizontal axis.
    """

    at: float
    seconds: float
    is_saturated: bool


def latency(run: Run, statistic: str) -> float:
    """Mean or P99 latency in seconds."""
    if statistic == "mean":
        return run.mean("latency_seconds")
    return run.percentile("latency_seconds", 99)


def lines_of(
    runs: Iterable[Run],
    statistic: str,
    key: Callable[[Run], Key],
    at: Callable[[Run], float | None],
) -> dict[Key, list[Point]]:
    """Points by line, in the order of the axis; runs that have no place on it are left out."""
    lines: dict[Key, list[Point]] = defaultdict(list)
    for run in runs:
        if (place := at(run)) is not None:
            point = Point(place, latency(run, statistic), run.saturation is not None)
            lines[key(run)].append(point)
    return {name: sorted(line, key=lambda point: point.at) for name, line in lines.items()}


def draw_lines(
    axes: Axes,
    lines: Mapping[Key, Sequence[Point]],
    looks: Mapping[Key, Look],
    max_seconds: float | None = None,
) -> bool:
    """Draws lines with hollow saturated points; returns whether any point is beyond the axis."""
    points = [point for line in lines.values() for point in line]
    values = [point.seconds for point in points]
    cap = max_seconds or axis_cap(values, [point.is_saturated for point in points])
    beyond: dict[float, list[Look]] = defaultdict(list)
    for name, line in lines.items():
        look = looks[name]
        axes.plot([p.at for p in line], [p.seconds for p in line], **look.line(marker=None))
        for point in line:
            if cap is not None and point.seconds > cap:
                beyond[point.at].append(look)
            else:
                axes.plot([point.at], [point.seconds], **look.point(point.is_saturated))
    axes.set_ylim(0, cap if cap is not None else 1.08 * max(values) or 1.0)
    for at, there in beyond.items():
        for place, look in enumerate(there):
            mark_beyond(axes, at, look, 2 * place - len(there) + 1)
    return bool(beyond)
