"""Where an axis ends when saturated runs go through the roof, and how points beyond are marked.

Decides the limit and the marks: latencies of a saturated run say how long it was run, not how
slow the system is, so they do not stretch the axis. Called by the figures.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from sangam_loadtest.report.style import GREY, Look

_ROOM = 1.12
_MAX_MEDIANS = 6.0
_SHIFT_POINTS = 3.8

BEYOND_NOTE = (
    "A triangle at the upper edge stands for a point beyond the axis, which ends a little above "
    "the highest point of a run that is not saturated; the table has the value."
)
SATURATED_NOTE = (
    "Hollow points are saturated runs (latency still growing at the end, or over 1 % of the "
    "requests failed): their values grow with the length of the run and are no steady state."
)


def axis_cap(values: Sequence[float], is_saturated: Sequence[bool]) -> float | None:
    """Upper limit of an axis for these values; None where all of them fit.

    The limit is a little above the highest value of a run that is not saturated, and at most
    six times those runs' median; with only saturated runs it is twice the lowest.
    """
    known = [v for v in values if np.isfinite(v)]
    steady = [v for v, s in zip(values, is_saturated, strict=True) if not s and np.isfinite(v)]
    if not known:
        return None
    if steady:
        cap = min(max(steady), _MAX_MEDIANS * float(np.median(steady))) * _ROOM
    else:
        cap = 2 * min(known)
    return cap if cap > 0 and max(known) > cap else None


def mark_beyond(axes: Axes, at: float, look: Look, place: int) -> None:
    """A triangle at the upper edge, shifted a little by place so that none hides another."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    shift = ScaledTranslation(place * _SHIFT_POINTS / 72, 0, figure.dpi_scale_trans)
    axes.plot(
        [at],
        [1.0],
        **look.point(is_hollow=True) | {"marker": "^", "markersize": 7},
        clip_on=False,
        zorder=5,
        transform=axes.get_xaxis_transform() + shift,
    )


def mark_handles(is_any_saturated: bool, is_any_beyond: bool) -> list[Line2D]:
    """What the legend says of hollow points and triangles, where there are any."""
    hollow: dict[str, Any] = Look(GREY, "o", "-").point(is_hollow=True)
    found = [Line2D([], [], label="saturated", **hollow)] * is_any_saturated
    beyond = Line2D([], [], label="beyond the axis", **hollow | {"marker": "^"})
    return found + [beyond] * is_any_beyond


def mark_notes(is_any_saturated: bool, is_any_beyond: bool) -> tuple[str, ...]:
    """The same in sentences."""
    return (SATURATED_NOTE,) * is_any_saturated + (BEYOND_NOTE,) * is_any_beyond
