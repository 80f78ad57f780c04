"""Which workers a router can use: those that serve what it serves, in a way that it understands.

Decides what has to be equal and says what is not, in words for people. Pure; called by
``snapshots``, shown by the fleet view and its report. The scripts check model and protocol again;
the rest never changes within a worker's epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sangam_core.geometry import PAGE_TOKENS
from sangam_core.lease import WorkerLease

_SETTINGS = {"model": "SANGAM_MODEL", "block_length": "SANGAM_BLOCK_LENGTH"}
"""What operators change; the rest is the version's."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of a worker's lease that is not as the router needs it."""

    field: str
    theirs: str
    ours: str

    def __str__(self) -> str:
        remedy = _SETTINGS.get(self.field, "another version")
        return f"{self.field} {self.theirs}, here {self.ours} ({remedy})"


@dataclass(frozen=True, slots=True)
class Misfit:
    """A worker that gets no work of this router, and why.

    Attributes:
        lease: None where it cannot be read.
        differences: never empty.
    """

    worker_id: str
    lease: WorkerLease | None
    differences: tuple[Difference, ...]

    @property
    def reason(self) -> str:
        """Why, in words for people."""
        return ", ".join(map(str, self.differences))


@dataclass(frozen=True, slots=True)
class Service:
    """What a worker must have in common with a router.

    Attributes:
        protocol: of the internal API. block_length: positions of a block.
    """

    model: str
    protocol: int
    block_length: int

    def misfit(self, worker_id: str, fields: Mapping[str, str]) -> Misfit | None:
        """What keeps a worker from this router's work; None when nothing does.

        Args:
            fields: its lease as it lies in Redis.
        """
        lease = WorkerLease.from_fields(fields)
        found = _unreadable(fields) if lease is None else self._differences(lease)
        return Misfit(worker_id, lease, found) if found else None

    def _differences(self, lease: WorkerLease) -> tuple[Difference, ...]:
        needed = {
            "model": self.model,
            "protocol": self.protocol,
            "block_length": self.block_length,
            "page_tokens": PAGE_TOKENS,
        }
        return tuple(
            Difference(field, str(getattr(lease, field)), str(ours))
            for field, ours in needed.items()
            if getattr(lease, field) != ours
        )


def _unreadable(fields: Mapping[str, str]) -> tuple[Difference, ...]:
    """The fields of a lease that this version cannot read."""
    wrong = WorkerLease.unreadable_fields(fields)
    return tuple(Difference(field, fields.get(field, "missing"), "unreadable") for field in wrong)
