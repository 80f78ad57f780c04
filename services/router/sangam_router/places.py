"""What the driver needs of the ledger: a place for a block, and giving it back.

A seam: ``ledger_places`` is the real one, tests have one in memory. Waiting in line, deadlines
and the choice of the worker are behind it.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from sangam_core.lifecycle import Request
from sangam_core.placement import Demand, Role


@dataclass(frozen=True, slots=True)
class Place:
    """A worker that a block may go to now, and what is reserved there for it.

    Attributes:
        url: base of the worker's internal API. role: as it was when the place was reserved.
        kv_format: what the worker's KV is in (``WorkerLoad.kv_format``).
        reservation: the ledger's own handle.
    """

    worker_id: str
    epoch: str
    url: str
    role: Role
    reservation: Any
    kv_format: str = ""


class Places(Protocol):
    """Places for blocks, in order of arrival.

    Getting one waits in line for as long as it takes; the caller's deadline cancels it, and then
    nothing is held. Releasing never fails, may be repeated, and is carried through even when the
    caller is cancelled.
    """

    async def prefill(
        self, request: Request, demand: Demand, avoid: Collection[str], *, is_new: bool
    ) -> Place:
        """A place for the current block's prefill.

        Args:
            avoid: epochs of workers that lost this block; taken only where nobody else has room.
            is_new: the request holds nothing yet, so a full line may turn it away.

        Raises:
            Overloaded: the line is full.
            Unavailable: no worker could ever take it for too long, or Redis does not answer.
            InvalidRequest: it can never fit (new requests only).
        """
        ...

    async def decode(self, request: Request, demand: Demand, avoid: Collection[str]) -> Place:
        """A place for the decode of a block that is prefilled. Raises ``Unavailable``."""
        ...

    def lost(self, place: Place) -> asyncio.Event:
        """Set once the place's worker is known to be gone, or to have another epoch."""
        ...

    async def release_load(self, place: Place) -> None:
        """The prefill's iteration has run: its load is off the worker."""
        ...

    async def release(self, place: Place) -> None:
        """Give back whatever of the place is still held."""
        ...
