"""The plain data that goes into and comes out of the ledger.

Decides names and shapes only. The driver and the fleet view read these; ``ledger.py`` makes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sangam_core.lease import WorkerLease
from sangam_core.placement import FleetLoad
from sangam_core.wire import BlockKey
from sangam_router.ledger.compatibility import Misfit

UNIT_SEPARATOR = "\x1f"
"""Between the parts of records and line entries; ids must not hold control characters."""


def check_id(value: str, name: str) -> str:
    """An id that may stand in a record.

    Raises:
        ValueError: it is empty or holds a control character.
    """
    if not value or not value.isprintable():
        raise ValueError(f"{name} {value!r}: must be non-empty and printable")
    return value


class Line(StrEnum):
    """The two waiting lines of a service. Each is strict: nobody overtakes its head."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """A request's place in every line: arrival (seconds since the epoch), then id."""

    arrival_seconds: float
    request_id: str

    def __post_init__(self) -> None:
        check_id(self.request_id, "request_id")


@dataclass(frozen=True, slots=True)
class Reservation:
    """A place that the ledger holds for one block, until all its records are released.

    Attributes:
        serial: names the records within this router.
        cost_tokens: the load record; 0 for a decode, which has none.
        num_pages: the pages record; 0 where the strategy keeps no KV.
        num_blocks: the blocks record, 1; 0 where there are no pages, or the router's placement
            counts no blocks.
    """

    serial: int
    key: BlockKey
    worker_id: str
    epoch: str
    cost_tokens: int
    num_pages: int
    num_blocks: int = 0


class RefusalReason(StrEnum):
    """Why the script did not reserve what the snapshot had promised."""

    OLDER_WAITS = "older_waits"
    """An older live request stands in the line: join it."""
    NO_PAGES = "no_pages"
    OVER_THETA = "over_theta"
    WORKER_GONE = "worker_gone"
    WORKER_CHANGED = "worker_changed"
    """Another epoch."""
    DRAINING = "draining"
    WRONG_ROLE = "wrong_role"
    INCOMPATIBLE = "incompatible"
    """Another model or protocol version."""
    TOO_LONG = "too_long"
    """The worker takes no sequence of that length."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was reserved. Unless an older request waits, look at a fresh snapshot."""

    reason: RefusalReason

    @property
    def must_wait(self) -> bool:
        """Whether a fresh snapshot would not help: the request has to stand in line."""
        return self.reason is RefusalReason.OLDER_WAITS


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The fleet that serves this router's model, at one instant.

    Attributes:
        fleet: what the placement policies take.
        leases: by worker id; url, limits and role are exact, counters like ``free_pages`` as of
            when the lease was first read.
        incompatible: workers with a lease that this router cannot use, and why.
        num_waiting: length of the prefill line; num_pending_decodes: of the decode line.
        taken_at_seconds: the ledger's clock just before the round trip.
    """

    fleet: FleetLoad
    leases: Mapping[str, WorkerLease]
    incompatible: tuple[Misfit, ...]
    num_waiting: int
    num_pending_decodes: int
    taken_at_seconds: float
