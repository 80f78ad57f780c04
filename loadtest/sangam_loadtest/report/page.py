"""The report as one HTML page that needs no other file.

Decides what is on the page; how it looks is ``page.html.j2``'s. Called by ``build``.
"""

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from sangam_loadtest.report.drawn import Drawn, Table
from sangam_loadtest.report.loading import is_labelled
from sangam_loadtest.report.runs import Run

_OPEN_ROWS = 12  # longer tables are folded
_PNG_SIZE_OFFSET = 16  # after the signature and the first chunk's length and type


@dataclass(frozen=True, slots=True)
class Grid:
    """A table as the page shows it: a column's name with whether it is flush right, texts."""

    columns: tuple[tuple[str, bool], ...]
    rows: list[list[str]]
    is_open: bool

    @classmethod
    def of(cls, table: Table) -> "Grid":
        """The cells as texts."""
        columns = tuple((name, table.is_numeric(n)) for n, name in enumerate(table.columns))
        return cls(columns, table.texts(), len(table.rows) <= _OPEN_ROWS)


@dataclass(frozen=True, slots=True)
class Section:
    """A figure on the page, its image as a data URI, at half its pixels: sharp on fine screens."""

    figure: Drawn
    image: str
    width: int
    height: int
    grid: Grid

    @classmethod
    def of(cls, figure: Drawn) -> "Section":
        """Reads the figure's PNG."""
        content = figure.path.read_bytes()
        width, height = struct.unpack_from(">II", content, _PNG_SIZE_OFFSET)
        image = "data:image/png;base64," + base64.b64encode(content).decode("ascii")
        return cls(figure, image, width // 2, height // 2, Grid.of(figure.table))

    @property
    def anchor(self) -> str:
        """The section's place on the page."""
        return self.figure.path.stem


def write_page(
    path: Path,
    title: str,
    runs: Sequence[Run],
    summary: Table,
    sections: Sequence[Section],
    missing: Mapping[str, str],
) -> None:
    """Write the page."""
    text = resources.files(__package__).joinpath("page.html.j2").read_text("utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(text).render(
        title=title,
        told=_told(runs),
        notes=notes_on(runs),
        summary=Grid.of(summary),
        sections=sections,
        missing=missing,
    )
    path.write_text(page, encoding="utf-8")


def _told(runs: Sequence[Run]) -> str:
    """What the report is of, in one line."""
    kinds = [run.label.kind or "of unknown kind" for run in runs]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    num_requests = sum(run.records.num_counted for run in runs)
    return f"Runs: {counts}; requests: {num_requests:,}. Times are in seconds."


def notes_on(runs: Sequence[Run]) -> list[str]:
    """What a reader must know of the runs as a whole."""
    unlabelled = [run.source for run in runs if run.summary and not is_labelled(run)]
    alone = [run.source for run in runs if not run.summary and run.source != "memory"]
    cut = [run.source for run in runs if run.summary.get("is_interrupted")]
    failed = [run.source for run in runs if run.records.num_answered < run.records.num_counted]
    told = [
        ("Without a summary beside them, so named after their files", alone),
        ("Without a label (--label), so named after their files", unlabelled),
        ("Interrupted", cut),
        ("With failed requests, whose latency is not counted", failed),
    ]
    return [f"{what}: {_some(sources)}." for what, sources in told if sources]


def _some(sources: Sequence[str], limit: int = 4) -> str:
    more = len(sources) - limit
    return ", ".join(sources[:limit]) + (f" and {more} more" if more > 0 else "")
