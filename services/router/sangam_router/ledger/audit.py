"""Recomputes the counters from the records: they are derived, and this shows whether they are.

Shown by ``/admin/audit``; tests hold it empty of differences. Decides nothing and changes nothing.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sangam_router.ledger.records import UNIT_SEPARATOR, Line


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it lies in Redis. ``kind`` is ``load`` (tokens), ``pages`` or ``blocks``."""

    owner: str
    kind: str
    block_key: str
    worker_id: str
    epoch: str
    amount: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a waiting line. ``pages`` is 0 in the prefill line."""

    service: str
    line: Line
    request_id: str
    owner: str
    pages: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A counter that is not the sum of its records. ``field`` is a worker and its epoch, or a
    service."""

    counter: str
    field: tuple[str, ...]
    counted: int
    recorded: int


@dataclass(frozen=True, slots=True)
class Audit:
    """Everything in the ledger at one instant, of all routers and services."""

    records: tuple[Record, ...]
    entries: tuple[Entry, ...]
    differences: tuple[Difference, ...]


def audit_of(reply: Sequence[Any]) -> Audit:
    """Check the reply of ``audit.lua``."""
    load, pages, blocks, pending_pages, flat_records, flat_entries = reply
    counters = {"load": load, "pages": pages, "blocks": blocks, "pending_pages": pending_pages}
    records = tuple(_records(flat_records))
    entries = tuple(_entries(flat_entries))
    sums: dict[str, Counter[str]] = {name: Counter() for name in counters}
    for record in records:
        sums[record.kind][UNIT_SEPARATOR.join((record.worker_id, record.epoch))] += record.amount
    for entry in entries:
        sums["pending_pages"][entry.service] += entry.pages
    differences = [
        difference
        for name, flat in counters.items()
        for difference in _differences(name, _pairs(flat), +sums[name])
    ]
    return Audit(records, entries, tuple(differences))


def _differences(
    name: str, counted: dict[str, int], recorded: Counter[str]
) -> Iterator[Difference]:
    for field in sorted({*counted, *recorded}):
        if counted.get(field) != recorded.get(field):
            place = tuple(field.split(UNIT_SEPARATOR))
            yield Difference(name, place, counted.get(field, 0), recorded[field])


def _pairs(flat: Sequence[str]) -> dict[str, int]:
    return {field: int(value) for field, value in zip(flat[::2], flat[1::2], strict=True)}


def _records(flat: Sequence[str]) -> Iterator[Record]:
    for owner, field, value in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
        amount, worker_id, epoch, block_key = value.split(UNIT_SEPARATOR)
        kind = field.partition(":")[2]
        yield Record(owner, kind, block_key, worker_id, epoch, int(amount))


def _entries(flat: Sequence[str]) -> Iterator[Entry]:
    for service, line, member in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
        request_id, owner, pages = member.split(UNIT_SEPARATOR)
        yield Entry(service, Line(line), request_id, owner, int(pages))
