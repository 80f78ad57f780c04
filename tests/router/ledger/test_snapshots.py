"""Shared snapshots: those who get one together still place one after the other."""

import asyncio

from tests.router.ledger.world import block

from sangam_core.placement import FleetLoad, Role, WorkerLoad
from sangam_router.ledger.records import FleetSnapshot, Reservation
from sangam_router.ledger.snapshots import SharedSnapshots
from sangam_router.ledger.tasks import OwnedTasks

DEADLINE_SECONDS = 10.0


class Source:
    """Takes a snapshot of the same idle worker each time a test lets it."""

    def __init__(self) -> None:
        self.may_end = asyncio.Semaphore(0)
        self.began = asyncio.Semaphore(0)

    async def take(self) -> FleetSnapshot:
        self.began.release()
        await self.may_end.acquire()
        worker = WorkerLoad("w", "w-1", Role.COLOCATED, 0, 100, 100)
        return FleetSnapshot(FleetLoad((worker,)), {}, (), 0, 0, 0.0)


async def test_a_draft_is_seen_by_all_who_share_the_snapshot_though_another_is_under_way() -> None:
    source, tasks = Source(), OwnedTasks()
    snapshots = SharedSnapshots(source.take, tasks)
    seen: list[tuple[int, int]] = []

    async def place(number: int) -> None:
        snapshot = await snapshots.get()
        worker = snapshot.fleet.workers[0]
        seen.append((worker.free_pages, worker.num_blocks))
        key = block(f"r{number}")
        snapshots.note(Reservation(number, key, "w", "w-1", 64, num_pages=4, num_blocks=1))

    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(place(number))
        await source.began.acquire()
        later = group.create_task(snapshots.get())
        await asyncio.sleep(0)  # it asks: the next snapshot begins as soon as this one ends
        source.may_end.release()
        await source.began.acquire()
        source.may_end.release()
    assert seen == [(100, 0), (96, 1), (92, 2)]
    assert later.result().fleet.workers[0].free_pages == 88
    await tasks.aclose()
