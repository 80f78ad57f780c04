"""What is written of each request, measured or simulated alike: one JSON object a line.

Decides the fields and how a file of them is written and read. ``summary`` and ``report`` read it;
the client and the simulator fill it.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from sangam_core.errors import SangamError


class RecordsError(SangamError):
    """A file of records cannot be read; names file, line and field."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request's fate. Times are seconds; a latency counts from when the request was *due*.

    Attributes:
        index: place in the trace, from 0.
        scheduled_seconds: when it was due, after the start of the run.
        sent_seconds: when it was really sent, after the start (later where the client was late).
        is_warmup: not to be counted.
        error: kind of failure (``timeout``, ``http_503``, ...); None where it was answered.
        latency_seconds: from due to the last byte; None on an error.
        first_token_seconds: from due to the first text; None where none came.
        queueing_seconds: all waiting, over all blocks: the sum of the two that follow.
        prefill_queueing_seconds: waiting for a place for prefills and for the token budget.
        decode_queueing_seconds: prefilled and waiting for pages on a decode worker, then parked
            there until it joins the decodes; 0 where prefills and decodes share a worker.
        num_steps: passes whose commits counted.
        placements: for each block, the workers that it ran on, in order.
        commit_counts: for each block, tokens committed by each of its passes that counted, the
            prefill's first.
        is_right: whether the answer was right, where that is known.
    """

    index: int
    scheduled_seconds: float
    sent_seconds: float
    prompt_tokens: int
    output_tokens: int
    is_warmup: bool = False
    error: str | None = None
    error_message: str | None = None
    latency_seconds: float | None = None
    first_token_seconds: float | None = None
    server_latency_seconds: float | None = None
    queueing_seconds: float | None = None
    prefill_queueing_seconds: float | None = None
    decode_queueing_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    transfer_seconds: float | None = None
    num_blocks: int | None = None
    num_steps: int | None = None
    num_retries: int | None = None
    placements: list[list[str]] = field(default_factory=list)
    commit_counts: list[list[int]] = field(default_factory=list)
    task: str | None = None
    is_right: bool | None = None

    def to_json(self) -> str:
        """One line, without what is not known."""
        told = {k: v for k, v in asdict(self).items() if v is not None and v != []}
        return json.dumps(
            {k: round(v, 6) if isinstance(v, float) else v for k, v in told.items()},
            separators=(",", ":"),
        )


_NAMES = {item.name for item in fields(RequestRecord)}


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """Write a file of records."""
    with path.open("w", encoding="utf-8") as file:
        write_record_lines(file, records)


def write_record_lines(file: TextIO, records: Iterable[RequestRecord]) -> None:
    """Write records into an open file."""
    for record in records:
        file.write(record.to_json() + "\n")


def read_records(path: Path) -> list[RequestRecord]:
    """Read a file of records. Fields that this version does not know are passed over.

    Raises:
        RecordsError: the file cannot be read, or a line is no record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RecordsError(f"{path}: {error.strerror}") from error
    found: list[RequestRecord] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
            found.append(RequestRecord(**{k: v for k, v in entry.items() if k in _NAMES}))
        except (ValueError, TypeError, AttributeError) as error:
            raise RecordsError(f"{path}, line {number}: not a request's record: {error}") from error
    return found
