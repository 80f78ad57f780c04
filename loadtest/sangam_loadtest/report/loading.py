"""Runs from files: ``NAME.jsonl`` with ``NAME.summary.json`` beside it.

Decides which files a path means (a file, or every ``.jsonl`` below a folder), and what stands for a
label that is not there: the file's name for the configuration; what the summary says of the model,
the trace and the rate. Files are read in pieces, and only numbers are kept: 200 runs of 4,000
requests are 800,000 lines. Called by the ``report`` command and by whoever reproduces figures.
"""

import gc
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from sangam_loadtest.records import RecordsError
from sangam_loadtest.report.runs import (
    NUMBERS,
    ReportError,
    RequestNumbers,
    Run,
    checked,
    numbers_of,
)
from sangam_loadtest.run_files import Kind, RunLabel, summary_path

_PIECE_LINES = 2000
_TEXTS = ("configuration", "model", "trace", "system")


def load_runs(paths: Iterable[Path]) -> list[Run]:
    """Every run that the paths name, in their order; a folder's in the order of names.

    Raises:
        RecordsError: a file cannot be read, or a line is no record; names file and line.
        ReportError: a path has no records, or a summary is malformed.
    """
    files = record_files(paths)
    names = [path.stem for path in files]
    return [
        _called(load_run(path), f"{path.parent.name}/{path.stem}")
        if names.count(path.stem) > 1
        else load_run(path)
        for path in files
    ]


def _called(run: Run, name: str) -> Run:
    """The run by a longer name, if it is its file that names it."""
    if is_labelled(run):
        return run
    return replace(run, label=replace(run.label, configuration=name))


def is_labelled(run: Run) -> bool:
    """Whether the summary says what configuration a run is of."""
    label = run.summary.get("label")
    return isinstance(label, dict) and bool(label.get("configuration"))


def _filled(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.jsonl") if path.stat().st_size)


def record_files(paths: Iterable[Path]) -> list[Path]:
    """The files of records that files and folders name, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ReportError(f"{path}: there is no such file or folder")
        # A run that failed at its start leaves an empty file, which must not spoil a folder.
        files = _filled(path) if path.is_dir() else [path]
        if not files:
            raise ReportError(
                f"{path}: no .jsonl file in this folder has records; `sangam loadtest run` and "
                "`simulate` write them (--output)"
            )
        for file in files:
            found.setdefault(file.resolve(), file)
    if not found:
        raise ReportError("no run was given: name files of records (.jsonl) or folders of them")
    return list(found.values())


def load_run(path: Path) -> Run:
    """One run from its records and the summary beside them."""
    if path.suffix != ".jsonl":
        raise ReportError(
            f"{path}: a run is named by its records, {path.with_suffix('.jsonl').name}"
        )
    summary = _read_summary(summary_path(path))
    run = Run(label_of(summary, path), read_numbers(path), summary, str(path))
    return checked(replace(run, label=_with_rate(run)))


def passes_beside(files: Iterable[Path]) -> list[Path]:
    """The files of passes that runs left beside their records."""
    beside = (path.with_suffix(".passes.csv") for path in files)
    return [path for path in beside if path.exists()]


def read_numbers(path: Path) -> RequestNumbers:
    """The numbers of a file of records."""
    pieces: list[RequestNumbers] = []
    first_line = 1
    try:
        with path.open("rb") as file, _no_collection():
            while lines := list(islice(file, _PIECE_LINES)):
                pieces.append(_read_piece(lines, path, first_line))
                first_line += len(lines)
    except OSError as error:
        raise RecordsError(f"{path}: {error.strerror}") from error
    return _joined(pieces)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: records have no cycles, and looking for some is a third of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read_piece(lines: Sequence[bytes], path: Path, first_line: int) -> RequestNumbers:
    """Parses all lines at once, and one by one only to find which is wrong."""
    told = [line for line in lines if not line.isspace()]
    try:
        entries = json.loads(b"[" + b",".join(told) + b"]")
        if len(entries) != len(told):
            raise ValueError("a line is not one record")
        return numbers_of(_checked(entries))
    except (ValueError, TypeError, AttributeError):
        for number, line in enumerate(lines, start=first_line):
            if line.isspace():
                continue
            try:
                numbers_of(_checked([json.loads(line)]))
            except (ValueError, TypeError, AttributeError) as error:
                raise RecordsError(
                    f"{path}, line {number}: not a request's record: {error} "
                    "(a run that was killed may leave half a last line: delete it)"
                ) from error
        raise


def _checked(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for entry in entries:
        if "scheduled_seconds" not in entry or "output_tokens" not in entry:
            raise ValueError("scheduled_seconds or output_tokens is missing")
    return entries


def _joined(pieces: Sequence[RequestNumbers]) -> RequestNumbers:
    if not pieces:
        return numbers_of(())
    due = np.concatenate([piece.columns["scheduled_seconds"] for piece in pieces])
    order = np.argsort(due, kind="stable")
    return RequestNumbers(
        {
            name: np.concatenate([piece.columns[name] for piece in pieces])[order]
            for name in NUMBERS
        },
        np.concatenate([piece.is_answered for piece in pieces])[order],
        sum(piece.num_warmup for piece in pieces),
        sum(piece.num_interrupted for piece in pieces),
    )


def _read_summary(path: Path) -> Mapping[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ReportError(
            f"{path}: not JSON: {error}; delete it to report without a label"
        ) from error
    if not isinstance(summary, dict):
        raise ReportError(f"{path}: must be a JSON object")
    return summary


def label_of(summary: Mapping[str, Any], path: Path) -> RunLabel:
    """A run's label; what is not labelled is taken from the summary's options, then the name.

    Raises:
        ReportError: a field of the label is of the wrong type.
    """
    told = summary.get("label") or {}
    where = f"{summary_path(path)}: label"
    if not isinstance(told, dict):
        raise ReportError(f"{where} must be a JSON object")
    texts = {name: _text(told.get(name), f"{where}.{name}") for name in _TEXTS}
    tau_tokens = _number(told.get("tau_tokens"), f"{where}.tau_tokens")
    options = summary.get("options")
    options = options if isinstance(options, dict) else {}
    trace = options.get("trace")
    return RunLabel(
        kind=_kind(told.get("kind"), f"{where}.kind", summary.get("command")),
        configuration=texts["configuration"] or path.stem,
        model=texts["model"] or _short(options.get("model")),
        trace=_short(texts["trace"] or (trace.get("trace") if isinstance(trace, dict) else trace)),
        rate=_number(told.get("rate"), f"{where}.rate"),
        system=texts["system"],
        tau_tokens=None if tau_tokens is None else round(tau_tokens),
    )


def _kind(told: object, where: str, command: object) -> Kind | None:
    if told == "measured" or (told is None and command == "sangam loadtest run"):
        return "measured"
    if told is None or told == "simulated":
        return None if told is None else "simulated"
    raise ReportError(f"{where} must be measured, simulated or null, not {told!r}")


def _text(value: object, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    raise ReportError(f"{where} must be a text or null, not {value!r}")


def _number(value: object, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ReportError(f"{where} must be a positive number or null, not {value!r}")
    return float(value)


def _short(name: object) -> str | None:
    """A path's last part (models and traces may be files); other names as they are."""
    return PurePath(name).name if isinstance(name, str) and name else None


def _with_rate(run: Run) -> RunLabel:
    """The label, its rate taken from the summary or else from the due times if it has none."""
    if run.label.rate is not None:
        return run.label
    true_rate = run.summary.get("true_rate")
    if isinstance(true_rate, int | float) and true_rate > 0:
        return replace(run.label, rate=float(true_rate))
    due = run.records.columns["scheduled_seconds"]
    if len(due) > 1 and due[-1] > due[0]:
        rate = (len(due) - 1) / float(due[-1] - due[0])
        return replace(run.label, rate=float(f"{rate:.3g}"))
    return run.label
