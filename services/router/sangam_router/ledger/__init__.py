"""The Redis ledger (design section 4): reservations, waiting lines, leases of routers.

``Ledger`` is the entry; ``connect`` makes its client. Keys and records: ``lua/common.lua``.
"""

from sangam_router.ledger.ledger import Ledger
from sangam_router.ledger.records import (
    FleetSnapshot,
    Line,
    RefusalReason,
    Refused,
    Reservation,
    Ticket,
)
from sangam_router.ledger.waiting import Waiter

__all__ = [
    "FleetSnapshot",
    "Ledger",
    "Line",
    "RefusalReason",
    "Refused",
    "Reservation",
    "Ticket",
    "Waiter",
]
