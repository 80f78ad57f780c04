"""What this router holds in the ledger, as it knows it: the source when Redis lost its data.

Pure bookkeeping of reservations and of releases that Redis has not confirmed. ``ledger.py``
changes it; nothing here waits.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from sangam_router.ledger.records import Reservation


class RecordKind(StrEnum):
    """The records of a placement, and the counters that sum them."""

    LOAD = "load"
    PAGES = "pages"
    BLOCKS = "blocks"
    """Lives and dies with the pages record, where the placement counts blocks."""


def record_field(serial: int, kind: RecordKind) -> str:
    """A record's field in the hash of this router's records."""
    return f"{serial}:{kind}"


@dataclass(slots=True)
class Held:
    """A reservation with what of it has not been released: amounts by kind, none of them 0."""

    reservation: Reservation
    amounts: dict[RecordKind, int]

    @classmethod
    def whole(cls, reservation: Reservation) -> "Held":
        """A reservation of which nothing has been released."""
        amounts = {
            RecordKind.LOAD: reservation.cost_tokens,
            RecordKind.PAGES: reservation.num_pages,
            RecordKind.BLOCKS: reservation.num_blocks,
        }
        return cls(reservation, {kind: amount for kind, amount in amounts.items() if amount})

    @property
    def fields(self) -> list[str]:
        """Its records' fields."""
        return [record_field(self.reservation.serial, kind) for kind in self.amounts]


class Holdings:
    """Reservations by serial, and the fields still to be deleted in Redis."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self._asked: set[int] = set()
        self._releases: dict[str, None] = {}
        self._last_serial = 0

    def next_serial(self) -> int:
        """A serial that was never used by this process; ``settle`` it later."""
        self._last_serial += 1
        self._asked.add(self._last_serial)
        return self._last_serial

    def settle(self, serial: int, reservation: Reservation | None) -> None:
        """The fate of a serial is known: it was reserved, or not."""
        self._asked.discard(serial)
        if reservation is not None:
            self._held[serial] = Held.whole(reservation)

    def doubt(self, serial: int) -> None:
        """The fate of a serial will never be known: delete whatever there may be."""
        self._asked.discard(serial)
        self.delete(record_field(serial, kind) for kind in RecordKind)

    def delete(self, fields: Iterable[str]) -> None:
        """Have Redis delete records that nothing here stands for."""
        self._releases.update(dict.fromkeys(fields))

    def let_go(self, reservation: Reservation, kinds: Iterable[RecordKind]) -> None:
        """Release records; what was released before is left out."""
        held = self._held.get(reservation.serial)
        if held is None:
            return
        for kind in kinds:
            if held.amounts.pop(kind, 0):
                self._releases[record_field(reservation.serial, kind)] = None
        if not held.amounts:
            del self._held[reservation.serial]

    @property
    def releases(self) -> tuple[str, ...]:
        """Fields that Redis has to delete, oldest first."""
        return tuple(self._releases)

    def confirm(self, fields: Iterable[str]) -> None:
        """Redis has deleted these."""
        for field in fields:
            self._releases.pop(field, None)

    def all_held(self) -> list[Held]:
        """Everything that is held now."""
        return list(self._held.values())

    def knows(self, field: str) -> bool:
        """Whether a record of Redis's belongs to a reservation that is held or being made."""
        serial_text, _, kind = field.partition(":")
        serial = int(serial_text)
        if serial in self._asked:
            return True
        held = self._held.get(serial)
        return held is not None and record_field(serial, RecordKind(kind)) in held.fields

    def __iter__(self) -> Iterator[Reservation]:
        return (held.reservation for held in self.all_held())
