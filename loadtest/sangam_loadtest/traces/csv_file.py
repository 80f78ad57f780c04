"""How a CSV file of lengths, with or without arrival times, is read.

Decides which columns mean what: the names that public traces use are known (Vidur's and
Sarathi's, Azure's, our own), others are named by the caller. A bad value is an error with file,
line and column. Called by ``source``.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from sangam_loadtest.traces.request import TraceError, TraceRequest, malformed

PROMPT_COLUMNS = ("prompt_tokens", "num_prefill_tokens", "ContextTokens")
OUTPUT_COLUMNS = ("output_tokens", "num_decode_tokens", "GeneratedTokens")
ARRIVAL_COLUMNS = ("arrival_seconds", "TIMESTAMP", "timestamp")


@dataclass(frozen=True, slots=True)
class Columns:
    """Column names that the caller gives; None: one of the known ones.

    Attributes:
        arrival: seconds as a number, or a date and time as in ISO 8601.
    """

    prompt: str | None = None
    output: str | None = None
    arrival: str | None = None


def read_csv(path: Path, columns: Columns) -> list[TraceRequest]:
    """Requests in the file's order, or by arrival where there are time stamps.

    Raises:
        TraceError: the file cannot be read, lacks a column, or holds a bad value.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            requests = list(_rows(path, csv.reader(file, strict=True), columns))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a text file in UTF-8 ({error.reason})") from error
    if not requests:
        raise TraceError(f"{path}: holds no requests, only a header")
    if requests[0].arrival_seconds is not None:
        requests.sort(key=lambda request: request.arrival_seconds or 0.0)
        first = requests[0].arrival_seconds or 0.0
        requests = [
            replace(r, arrival_seconds=(r.arrival_seconds or 0.0) - first) for r in requests
        ]
    return requests


def _rows(path: Path, reader: Iterator[list[str]], columns: Columns) -> Iterator[TraceRequest]:
    header = [name.strip() for name in next(reader, [])]
    if not any(header):
        raise TraceError(
            f"{path}, line 1: empty; it must name the columns, e.g. "
            f"{PROMPT_COLUMNS[0]},{OUTPUT_COLUMNS[0]}, and each further line a request's lengths"
        )
    prompt = _column(path, header, columns.prompt, PROMPT_COLUMNS, "prompt lengths")
    output = _column(path, header, columns.output, OUTPUT_COLUMNS, "output lengths")
    has_arrivals = columns.arrival is not None or any(name in header for name in ARRIVAL_COLUMNS)
    arrival = (
        _column(path, header, columns.arrival, ARRIVAL_COLUMNS, "arrival times")
        if has_arrivals
        else None
    )
    line = 1
    try:
        for row in reader:
            line = getattr(reader, "line_num", line + 1)
            if not row:
                continue
            if len(row) != len(header):
                problem = f"{len(row)} values where the header names {len(header)}"
                raise TraceError(f"{path}, line {line}: {problem}")
            at = None
            if arrival is not None:
                at = _seconds(path, line, header[arrival], row[arrival])
            yield TraceRequest(
                _length(path, line, header[prompt], row[prompt]),
                _length(path, line, header[output], row[output]),
                arrival_seconds=at,
            )
    except csv.Error as error:
        raise TraceError(f"{path}, line {line + 1}: {error}") from error


def _column(
    path: Path, header: list[str], given: str | None, known: tuple[str, ...], what: str
) -> int:
    for name in (given,) if given is not None else known:
        if name in header:
            return header.index(name)
    wanted = repr(given) if given is not None else " or ".join(known)
    raise TraceError(
        f"{path}, line 1: no column {wanted} for the {what}; there are: {', '.join(header)}"
    )


def _length(path: Path, line: int, column: str, value: str) -> int:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (number >= 1 and number == int(number) and number <= 2**31):
        raise malformed(path, line, column, f"must be a whole number >= 1, not {value!r}")
    return int(number)


def _seconds(path: Path, line: int, column: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError:
            number = math.nan
        else:
            epoch = datetime(2000, 1, 1, tzinfo=moment.tzinfo)
            number = (moment - epoch).total_seconds()
    if not math.isfinite(number):
        raise malformed(
            path, line, column, f"must be seconds or a date and time (ISO 8601), not {value!r}"
        )
    return number
