"""Time of a decode iteration against its batch, a panel a model, a line an engine and context.

Decides when contexts get a line each (a benchmark has a few, each with several batches) and when
passes are summed up by batch alone (in a run the context varies with the batch).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from sangam_loadtest.report.drawn import Cell, Drawn, NothingToDraw, Table, listed
from sangam_loadtest.report.grouping import natural, shown
from sangam_loadtest.report.passes import Passes
from sangam_loadtest.report.style import (
    DASHES,
    MARKERS,
    OKABE_ITO,
    Look,
    drawing,
    legend_below,
    panels,
    save,
)

_PANEL_INCHES = (4.6, 3.1)
_MAX_COLUMNS = 2
_MAX_CONTEXTS = 4


@dataclass(frozen=True, slots=True)
class Point:
    """Passes of one batch: seconds at P10, P50 and P90."""

    decode_blocks: int
    num_passes: int
    seconds: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line: an engine's passes over contexts of one length, or of any.

    Attributes:
        context: its length in words.
    """

    model: str
    engine: str
    context: str
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        """As the legend has it."""
        return f"{self.engine}, {self.context}"


def decode_time_against_batch(passes: Sequence[Passes], path: Path) -> Drawn:
    """Draws the median time of a decode-only pass against its blocks, with P10 to P90.

    Raises:
        NothingToDraw: there is no decode-only pass.
    """
    curves = [curve for of in passes for curve in _curves_of(of)]
    if not curves:
        raise NothingToDraw(
            "No decode pass was given. Name files of passes with --passes (`make bench-passes` and "
            "`sangam loadtest simulate` write them as .passes.csv)."
        )
    models = list(dict.fromkeys(curve.model for curve in curves))
    looks = _looks(curves)
    with drawing():
        num_columns = min(len(models), _MAX_COLUMNS)
        figure, grid = panels(-(-len(models) // num_columns), num_columns, _PANEL_INCHES)
        cells = [axes for row in grid for axes in row]
        for axes in cells[len(models) :]:
            axes.set_axis_off()
        for axes, model in zip(cells, models, strict=False):
            _draw(axes, [curve for curve in curves if curve.model == model], looks)
            axes.set_title(model, loc="left")
        legend_below(figure, [looks[name].handle(name) for name in looks])
        save(figure, path)
    is_any_summed = any(p.num_passes > 1 for curve in curves for p in curve.points)
    return Drawn(
        path,
        "Decode iteration time against batch",
        "Time of a decode-only iteration against the number of blocks in it"
        + (": median, and P10 to P90 as a band." if is_any_summed else "."),
        f"Lines of milliseconds against decode blocks for {listed(list(looks))}; "
        f"{listed(models)}. The table below has every point.",
        _table(curves),
    )


def _draw(axes: Axes, curves: Sequence[Curve], looks: Mapping[str, Look]) -> None:
    right = top = 0.0
    for curve in curves:
        blocks = [point.decode_blocks for point in curve.points]
        low, median, high = np.array([point.seconds for point in curve.points]).T * 1000
        look = looks[curve.name]
        axes.fill_between(blocks, low, high, color=look.color, alpha=0.18, linewidth=0)
        axes.plot(blocks, median, **look.line())
        right, top = max(right, blocks[-1]), max(top, float(high.max()))
    axes.set_xlim(0, right * 1.04)
    axes.set_ylim(0, top * 1.06)
    axes.set_xlabel("decode blocks in the iteration")
    axes.set_ylabel("iteration time (ms)")


def _curves_of(passes: Passes) -> Iterator[Curve]:
    model = shown(passes.model) or passes.model
    contexts = np.unique(passes.context_tokens)
    lines = [(n, _points(passes, passes.context_tokens == n)) for n in contexts[:_MAX_CONTEXTS]]
    if len(contexts) == len(lines) and any(len(points) > 1 for _, points in lines):
        for context, points in lines:
            yield Curve(model, passes.name, f"{int(context):,} keys a block", points)
        return
    low, high = int(contexts[0]), int(contexts[-1])
    told = f"{low:,} to {high:,}" if high > low else f"{low:,}"
    everything = np.ones_like(passes.context_tokens, dtype=np.bool_)
    yield Curve(model, passes.name, f"{told} keys a block", _points(passes, everything))


def _points(passes: Passes, which: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[Point, ...]:
    blocks, seconds = passes.decode_blocks[which], passes.seconds[which]
    found = []
    for batch in np.unique(blocks):
        low, median, high = np.percentile(seconds[blocks == batch], (10, 50, 90))
        count = int((blocks == batch).sum())
        found.append(Point(int(batch), count, (float(low), float(median), float(high))))
    return tuple(found)


def _looks(curves: Sequence[Curve]) -> dict[str, Look]:
    """An engine's colour, a context's dashes, and a marker for each line."""
    names = {curve.name: curve for curve in curves}
    engines = list(dict.fromkeys(curve.engine for curve in curves))
    contexts = sorted({curve.context for curve in curves}, key=natural)
    return {
        name: Look(
            OKABE_ITO[engines.index(curve.engine) % len(OKABE_ITO)],
            MARKERS[place % len(MARKERS)],
            DASHES[contexts.index(curve.context) % len(DASHES)],
        )
        for place, (name, curve) in enumerate(names.items())
    }


def _table(curves: Sequence[Curve]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            curve.model,
            curve.engine,
            curve.context,
            point.decode_blocks,
            point.num_passes,
            *(1000 * seconds for seconds in point.seconds),
        )
        for curve in curves
        for point in curve.points
    ]
    columns = ("model", "engine", "context", "decode blocks", "passes")
    return Table((*columns, "P10 (ms)", "median (ms)", "P90 (ms)"), tuple(rows))
