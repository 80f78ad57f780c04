"""Takes snapshots of the fleet: shared by whoever asks at the same time, and cheap to parse.

Decides how a burst of requests sees one snapshot without all choosing the same worker; which
workers this router can use, is ``compatibility``'s. Called by ``ledger``.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sangam_core.lease import WorkerLease
from sangam_core.placement import FleetLoad, WorkerLoad
from sangam_router.ledger.compatibility import Misfit, Service
from sangam_router.ledger.records import UNIT_SEPARATOR, FleetSnapshot, Reservation
from sangam_router.ledger.tasks import OwnedTasks, SharedRuns

_NUM_HEAD_VALUES = 4
_NUM_WORKER_VALUES = 5

ReadLease = Callable[[str], Awaitable[Mapping[str, str]]]
"""Reads the fields of a worker's lease; empty when it has none."""


class SharedSnapshots:
    """Snapshots for many drivers at once.

    A caller gets a snapshot that was taken after it asked: the one that is about to be taken,
    never one under way. On top of it come the reservations that this router has asked for since,
    so that a burst of drivers that share a snapshot place one after the other, as they would with
    a snapshot each.

    Args:
        take: takes a snapshot.
    """

    def __init__(self, take: Callable[[], Awaitable[FleetSnapshot]], tasks: OwnedTasks) -> None:
        self._take = take
        self._runs = SharedRuns(self._take_with_drafts, tasks)
        self._drafts: list[Reservation] = []
        self._former_drafts: list[Reservation] = []

    async def get(self) -> FleetSnapshot:
        """The fleet as this router may count on it now. Raises what ``take`` raises."""
        snapshot, drafts = await self._runs.run()
        return _with_drafts(snapshot, drafts) if drafts else snapshot

    def note(self, draft: Reservation) -> None:
        """A reservation is being asked for; the snapshots taken before do not know of it."""
        self._drafts.append(draft)
        # The next snapshot may be under way before those who got the last one have decided on it.
        self._former_drafts.append(draft)

    async def _take_with_drafts(self) -> tuple[FleetSnapshot, list[Reservation]]:
        drafts: list[Reservation] = []
        self._former_drafts, self._drafts = self._drafts, drafts
        return await self._take(), drafts


def _with_drafts(snapshot: FleetSnapshot, drafts: Iterable[Reservation]) -> FleetSnapshot:
    loads = {(worker.worker_id, worker.epoch): worker for worker in snapshot.fleet.workers}
    for draft in drafts:
        worker = loads.get((draft.worker_id, draft.epoch))
        if worker is not None:
            loads[worker.worker_id, worker.epoch] = replace(
                worker,
                outstanding_prefill_tokens=worker.outstanding_prefill_tokens + draft.cost_tokens,
                free_pages=worker.free_pages - draft.num_pages,
                num_blocks=worker.num_blocks + draft.num_blocks,
            )
    return replace(snapshot, fleet=replace(snapshot.fleet, workers=tuple(loads.values())))


@dataclass(frozen=True, slots=True)
class _Known:
    """A worker's lease as it was read in full: usable, or a misfit."""

    epoch: str
    is_draining: bool
    lease: WorkerLease | None
    misfit: Misfit | None


class SnapshotReader:
    """Parses snapshots for routers of one service.

    A lease is read in full and validated once per worker epoch (and when draining starts or
    ends); every later snapshot takes only what changes: the counters.
    """

    def __init__(self, service: Service, *, read_lease: ReadLease) -> None:
        self._service = service
        self._read_lease = read_lease
        self._known: dict[str, _Known] = {}

    async def read(self, reply: list[Any], taken_at_seconds: float) -> FleetSnapshot:
        """The snapshot of a reply (see ``snapshot.lua`` for its layout)."""
        pending_pages, num_waiting, num_pending_decodes, flat_blocks = reply[:_NUM_HEAD_VALUES]
        blocks = dict(zip(flat_blocks[::2], flat_blocks[1::2], strict=True))
        workers: list[WorkerLoad] = []
        leases: dict[str, WorkerLease] = {}
        incompatible: list[Misfit] = []
        seen: dict[str, _Known] = {}
        values = [iter(reply[_NUM_HEAD_VALUES:])] * _NUM_WORKER_VALUES
        for worker_id, epoch, draining, load, pages in zip(*values, strict=True):
            known = self._known.get(worker_id)
            if known is None or (known.epoch, known.is_draining) != (epoch, draining == "1"):
                known = await self._read_anew(worker_id, epoch)
            if known is None:
                continue
            seen[worker_id] = known
            if known.misfit is not None:
                incompatible.append(known.misfit)
                continue
            lease = known.lease
            assert lease is not None, "what cannot be read is a misfit"
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
                    num_blocks=_num_blocks(blocks, worker_id, epoch) if blocks else 0,
                    max_sequence_tokens=lease.max_sequence_tokens,
                    kv_format=lease.kv_format,
                )
            )
        self._known = seen
        return FleetSnapshot(
            fleet=FleetLoad(tuple(workers), int(pending_pages)),
            leases=leases,
            incompatible=tuple(incompatible),
            num_waiting=num_waiting,
            num_pending_decodes=num_pending_decodes,
            taken_at_seconds=taken_at_seconds,
        )

    async def _read_anew(self, worker_id: str, epoch: str) -> _Known | None:
        """The lease as it is now; None where it has just changed, or gone."""
        fields = await self._read_lease(worker_id)
        if fields.get("epoch") != epoch:
            return None
        is_draining = fields.get("is_draining") == "1"
        lease = WorkerLease.from_fields(fields)
        return _Known(epoch, is_draining, lease, self._service.misfit(worker_id, fields))


def _num_blocks(blocks: Mapping[str, str], worker_id: str, epoch: str) -> int:
    return int(blocks.get(f"{worker_id}{UNIT_SEPARATOR}{epoch}", 0))
