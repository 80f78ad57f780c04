"""The files beside ``results.json``: a table to read, CSVs to fit costs from.

Decides which part goes into which file. Reads the results only, so that they can be made again:
``python -m benchmarks.gpu.written FOLDER`` writes all of them. A run itself writes the table, again
and again: what comes back from a GPU machine may be few files.
"""

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import fp8, passes
from benchmarks.gpu.parts import write_text
from benchmarks.gpu.tables import tables

PRODUCT_COLUMNS = ("model", "rows", "bf16_ms", "fp8_ms", "head_bf16_ms")


def write_files(folder: Path) -> None:
    """Write ``table.md`` of ``results.json``."""
    write_table(json.loads((folder / "results.json").read_text(encoding="utf-8")), folder)


def write_table(results: Mapping[str, Any], folder: Path) -> None:
    """Write ``table.md`` of results."""
    write_text(folder / "table.md", tables(results))


def write_csvs(folder: Path) -> None:
    """Write ``passes.csv``, ``products.csv``, ``fp8.csv``, ``attention.csv`` as far as their parts
    found something."""
    parts = json.loads((folder / "results.json").read_text(encoding="utf-8"))["parts"]
    if lines := [*_lines(parts, "decodes"), *_lines(parts, "prefills")]:
        passes.write_csv(folder / "passes.csv", lines)
    if lines := [*_lines(parts, "fp8")]:
        fp8.write_csv(folder / "fp8.csv", lines)
    if lines := [*_lines(parts, "products")]:
        _write(folder / "products.csv", PRODUCT_COLUMNS, lines)
    if lines := [*_lines(parts, "attention")]:
        _write(folder / "attention.csv", tuple(lines[0]), lines)


def _lines(parts: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    for part, record in parts.items():
        if part.partition(" ")[0] == name:
            yield from record["found"].get("lines", ())


def _write(path: Path, columns: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for line in lines:
            writer.writerow({key: line[key] for key in columns})


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
    write_csvs(Path(sys.argv[1]))
