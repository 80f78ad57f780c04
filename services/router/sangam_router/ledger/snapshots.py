"""Turns the reply of ``snapshot.lua`` into a ``FleetSnapshot``, cheaply.

Decides which workers serve this router: same model, same protocol version. A lease is read in
full and validated once per worker epoch (and when draining starts); every later snapshot takes
only what changes: the counters.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sangam_core.lease import WorkerLease
from sangam_core.placement import FleetLoad, WorkerLoad
from sangam_router.ledger.records import FleetSnapshot

_NUM_HEAD_VALUES = 3
_NUM_WORKER_VALUES = 5

ReadLease = Callable[[str], Awaitable[Mapping[str, str]]]
"""Reads the fields of a worker's lease; empty when it has none."""


class SnapshotReader:
    """Parses snapshots for routers of one model and protocol version."""

    def __init__(self, *, model: str, protocol: int, read_lease: ReadLease) -> None:
        self._model = model
        self._protocol = protocol
        self._read_lease = read_lease
        self._leases: dict[str, WorkerLease] = {}

    async def read(self, reply: list[Any], taken_at_seconds: float) -> FleetSnapshot:
        """The snapshot of a reply (see ``snapshot.lua`` for its layout)."""
        workers: list[WorkerLoad] = []
        leases: dict[str, WorkerLease] = {}
        incompatible: list[WorkerLease] = []
        seen: dict[str, WorkerLease] = {}
        for start in range(_NUM_HEAD_VALUES, len(reply), _NUM_WORKER_VALUES):
            worker_id, epoch, draining, load, pages = reply[start : start + _NUM_WORKER_VALUES]
            lease = await self._lease(worker_id, epoch, is_draining=draining == "1")
            if lease is None:
                continue
            seen[worker_id] = lease
            if lease.model != self._model or lease.protocol != self._protocol:
                incompatible.append(lease)
                continue
            leases[worker_id] = lease
            workers.append(
                WorkerLoad(
                    worker_id=worker_id,
                    epoch=epoch,
                    role=lease.role,
                    outstanding_prefill_tokens=int(load),
                    free_pages=lease.total_pages - int(pages),
                    total_pages=lease.total_pages,
                    is_draining=lease.is_draining,
                )
            )
        self._leases = seen
        pending_pages, num_waiting, num_pending_decodes = reply[:_NUM_HEAD_VALUES]
        return FleetSnapshot(
            fleet=FleetLoad(tuple(workers), int(pending_pages)),
            leases=leases,
            incompatible=tuple(incompatible),
            num_waiting=num_waiting,
            num_pending_decodes=num_pending_decodes,
            taken_at_seconds=taken_at_seconds,
        )

    async def _lease(self, worker_id: str, epoch: str, *, is_draining: bool) -> WorkerLease | None:
        """The lease as last read, or read again; None where it is torn or has just changed."""
        known = self._leases.get(worker_id)
        if known is None or known.epoch != epoch or known.is_draining != is_draining:
            known = WorkerLease.from_fields(await self._read_lease(worker_id))
        return known if known is not None and known.epoch == epoch else None
