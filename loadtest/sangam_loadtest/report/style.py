"""How every figure looks: sizes, fonts, colours, marks; and how one is saved.

Decides: Okabe and Ito's colours (told apart by colour-blind readers), with a marker and dashes
for each series, so that colour is never needed; widths so that 9 pt can be read
at the width of a page; legends outside of the axes. Uses matplotlib's objects, not pyplot, so no
state outlives a figure. Called by the figures.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from sangam_loadtest.report.grouping import Series

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK = OKABE_ITO
GREY = "#6b7280"
MARKERS = ("o", "s", "D", "v", "P", "X", "<", ">", "h", "p")  # "^" marks what is off the axis
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)), (0, (8, 2, 2, 2)))
PAGE_INCHES = 11.0
_ENTRY_INCHES, _LETTER_INCHES = 0.72, 0.074  # of a legend at 9 pt
_RC: Any = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titlepad": 10,  # above the triangles of points beyond the axis
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#d4d7dc",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "hatch.linewidth": 0.7,
    "figure.facecolor": "white",
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "sangam",  # the same runs give the same bytes
    "pdf.fonttype": 42,
}


@dataclass(frozen=True, slots=True)
class Look:
    """How a series is drawn."""

    color: str
    marker: str
    dashes: Any

    def line(self, **more: Any) -> dict[str, Any]:
        """Keywords of a line with markers."""
        return {"color": self.color, "marker": self.marker, "linestyle": self.dashes} | more

    def point(self, is_hollow: bool = False) -> dict[str, Any]:
        """Keywords of a marker alone."""
        face = "white" if is_hollow else self.color
        return self.line(linestyle="none", markerfacecolor=face, markeredgewidth=1.5)

    def handle(self, label: str) -> Line2D:
        """An entry of a legend."""
        return Line2D([], [], label=label, **self.line())


def looks_of(series: Sequence[Series]) -> dict[Series, Look]:
    """A look for each series: its configuration's colour, its variant's dashes, its own marker."""
    configurations = list(dict.fromkeys(s.configuration for s in series))
    variants = list(dict.fromkeys(s.variant for s in series if s.variant))
    if len(configurations) == 1:  # then the colours tell the variants apart
        return {s: look(place) for place, s in enumerate(series)}
    return {
        s: Look(
            OKABE_ITO[configurations.index(s.configuration) % len(OKABE_ITO)],
            MARKERS[n % len(MARKERS)],
            DASHES[variants.index(s.variant) % len(DASHES) if s.variant else 0],
        )
        for n, s in enumerate(series)
    }


def look(place: int) -> Look:
    """A look by place; colours come again after seven, with other dashes and markers."""
    return Look(
        OKABE_ITO[place % len(OKABE_ITO)],
        MARKERS[place % len(MARKERS)],
        DASHES[place // len(OKABE_ITO) % len(DASHES)],
    )


@contextmanager
def drawing() -> Iterator[None]:
    """Fonts and lines for what is made and saved inside."""
    with mpl.rc_context(_RC):
        yield


def panels(
    num_rows: int, num_columns: int, panel_inches: tuple[float, float], **more: Any
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of panels with room for a legend at the bottom."""
    width, height = panel_inches
    figure = Figure(
        figsize=(min(width * num_columns, PAGE_INCHES), height * num_rows + 0.5),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(wspace=0.04, hspace=0.04)
    axes = figure.subplots(num_rows, num_columns, squeeze=False, **more)
    return figure, [list(row) for row in axes]


def legend_below(figure: Figure, handles: Sequence[Any]) -> None:
    """A legend under all panels, where it covers nothing, in as few rows as fit."""
    widths = [_ENTRY_INCHES + _LETTER_INCHES * len(str(handle.get_label())) for handle in handles]
    num_rows = 1
    while num_rows < len(widths) and _legend_inches(widths, num_rows) > figure.get_figwidth():
        num_rows += 1
    figure.legend(
        handles=list(handles),
        loc="outside lower center",
        ncols=-(-len(widths) // num_rows),
        handlelength=2.6,
    )


def _legend_inches(widths: Sequence[float], num_rows: int) -> float:
    """Width of a legend, whose columns fill one after the other, the first ones one entry more."""
    num_columns = -(-len(widths) // num_rows)
    few, num_longer = divmod(len(widths), num_columns)
    total, start = 0.0, 0
    for column in range(num_columns):
        end = start + few + (column < num_longer)
        total += max(widths[start:end])
        start = end
    return total


def save(figure: Figure, path: Path) -> None:
    """Writes a figure in the format of the path's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date: the same runs give the same bytes
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
    figure.savefig(path, metadata=metadata)
