"""The files beside ``results.json``: a table to read, CSVs to fit costs from.

Decides which part goes into which file. Reads the results only, so that they can be made again:
``python -m benchmarks.gpu.written FOLDER``. Called at the end of a run.
"""

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import fp8, passes
from benchmarks.gpu.tables import tables

PRODUCT_COLUMNS = ("model", "rows", "bf16_ms", "fp8_ms", "head_bf16_ms")


def write_files(folder: Path) -> None:
    """Write ``table.md``, and ``passes.csv``, ``products.csv``, ``fp8.csv``, ``attention.csv`` as
    far as their parts found something."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    (folder / "table.md").write_text(tables(results), encoding="utf-8")
    parts = results["parts"]
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
