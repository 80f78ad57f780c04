"""Measured or simulated passes of a model from CSV files.

Decides which columns are needed and how a bad cell is told. The columns are those of the GPU
benchmark: ``model,engine,launch,prefill_tokens,decode_blocks,context_tokens,total_ms``; others are
passed over. Called by the ``report`` command.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sangam_loadtest.report.runs import Floats, ReportError

_TEXTS = ("model", "engine", "launch")
_NUMBERS = ("prefill_tokens", "decode_blocks", "context_tokens", "total_ms")


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """The decode-only passes of one engine on one model, a place in each array a pass.

    Attributes:
        name: engine and launch, and the file where several have the same.
        context_tokens: keys of each block.
        seconds: what a pass took.
    """

    model: str
    name: str
    decode_blocks: Floats
    context_tokens: Floats
    seconds: Floats


def load_passes(paths: Iterable[Path], *, is_pooled: bool = False) -> list[Passes]:
    """The decode-only passes of files, by model, engine and file.

    Args:
        is_pooled: files of one engine on one model are one, as those of many runs are.

    Raises:
        ReportError: a file cannot be read, lacks a column, or a cell is no number.
    """
    found: dict[tuple[str, str, Path | None], list[tuple[float, float, float]]] = {}
    for path in dict.fromkeys(paths):
        for model, name, numbers in _read(path):
            found.setdefault((model, name, None if is_pooled else path), []).append(numbers)
    names = [(model, name) for model, name, _ in found]
    passes = []
    for (model, name, file), rows in found.items():
        blocks, context, seconds = np.array(rows, dtype=np.float64).T
        if file is not None and names.count((model, name)) > 1:
            name += f" ({file.name.removesuffix('.csv').removesuffix('.passes')})"
        passes.append(Passes(model, name, blocks, context, seconds))
    return passes


def _read(path: Path) -> list[tuple[str, str, tuple[float, float, float]]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            lacking = {"model", *_NUMBERS} - set(reader.fieldnames or ())
            if lacking:
                raise ReportError(
                    f"{path}, line 1: no column {', '.join(sorted(lacking))}; columns must be "
                    f"{','.join((*_TEXTS, *_NUMBERS))}"
                )
            return [row for entry in reader if (row := _decode_pass(entry, path, reader.line_num))]
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{path}: not a text file: {error}") from error


def _decode_pass(
    entry: dict[str, str | None], path: Path, line: int
) -> tuple[str, str, tuple[float, float, float]] | None:
    """A row as numbers; None where a prefill is in the pass."""
    numbers = {}
    for name in _NUMBERS:
        try:
            numbers[name] = float(entry[name] or "")
        except ValueError as error:
            raise ReportError(
                f"{path}, line {line}: {name} must be a number, not {entry[name]!r}"
            ) from error
    if numbers["prefill_tokens"] or not numbers["decode_blocks"]:
        return None
    engine = " ".join(part for part in (entry.get("engine"), entry.get("launch")) if part)
    values = (numbers["decode_blocks"], numbers["context_tokens"], numbers["total_ms"] / 1000)
    return entry["model"] or "unknown model", engine or "pass", values
