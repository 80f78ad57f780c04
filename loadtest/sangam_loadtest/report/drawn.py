"""What a figure hands back: the file, what to say of it, and its numbers as a table.

Decides how numbers read in a table. Used by every figure, by the page, and by whoever puts a table
into a README.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sangam_core.errors import SangamError

Cell = str | float | int | None
UNKNOWN = "-"
"""How a cell without a value reads."""


class NothingToDraw(SangamError):
    """The runs given have nothing for this figure; the text says what would provide it."""


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers under a figure. A cell that is None or NaN is not known."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def texts(self) -> list[list[str]]:
        """The rows as they read: three significant digits, thousands apart."""
        return [[told(cell) for cell in row] for row in self.rows]

    def is_numeric(self, column: int) -> bool:
        """Whether a column holds numbers, so that it is set flush right."""
        cells = [row[column] for row in self.rows if row[column] is not None]
        return bool(cells) and not any(isinstance(cell, str) for cell in cells)

    def to_markdown(self) -> str:
        """The table for a README."""
        marks = ["--:" if self.is_numeric(n) else "---" for n in range(len(self.columns))]
        lines = [list(self.columns), marks, *self.texts()]
        escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        return "\n".join("| " + " | ".join(line) + " |" for line in escaped) + "\n"

    def write_csv(self, path: Path) -> None:
        """The table with all digits; unknown cells are empty."""
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            writer.writerows(
                ["" if is_unknown(cell) else cell for cell in row] for row in self.rows
            )


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure on disk.

    Attributes:
        path: the image.
        caption: what is shown, in one or two sentences.
        alt: the same for who cannot see it.
        notes: what a reader must know of these runs (axis cut, saturated runs, parts missing).
        table: the numbers drawn.
    """

    path: Path
    title: str
    caption: str
    alt: str
    table: Table
    notes: tuple[str, ...] = ()


def is_unknown(cell: Cell) -> bool:
    """Whether a cell has no value."""
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def told(cell: Cell) -> str:
    """A cell as it reads in a table."""
    if cell is None or is_unknown(cell):
        return UNKNOWN
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or cell == round(cell):
        return f"{int(cell):,}"
    if abs(cell) >= 99.95:
        return f"{cell:,.0f}"
    return f"{cell:#.3g}"


def rate_told(rate: float | None) -> str:
    """A rate as a title has it."""
    return "unknown rate" if rate is None else f"{rate:g} requests/s"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence."""
    if len(names) < 2:
        return "".join(names)
    return ", ".join(names[:-1]) + " and " + names[-1]
