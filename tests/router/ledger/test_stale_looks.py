"""A fleet that changes between every look and its reservation: looked at again, a few times."""

import asyncio
import math

import pytest
from tests.router.ledger.world import MODEL, World, block, demand, lease, placer, ticket, until

from sangam_core.placement import Demand, WorkerLoad
from sangam_core.wire import BlockKey
from sangam_router.ledger import Ledger, RefusalReason, Refused, Reservation, Ticket
from sangam_router.ledger.waiting import Waiter

pytestmark = pytest.mark.integration


class SeesWorkersChange(Ledger):
    """Every reservation of its finds that its worker has restarted since the look."""

    num_reserved = 0
    num_reserved_before_joining = 0
    is_calm = False

    async def reserve_prefill(
        self,
        ticket: Ticket,
        key: BlockKey,
        demand: Demand,
        worker: WorkerLoad,
        *,
        bound_tokens: float = math.inf,
    ) -> Reservation | Refused:
        """Reserve, in vain until the fleet is calm."""
        self.num_reserved += 1
        if not self.is_calm:
            return Refused(RefusalReason.WORKER_CHANGED)
        return await super().reserve_prefill(ticket, key, demand, worker, bound_tokens=bound_tokens)

    async def join_line(self, ticket: Ticket, *, limit: int | None = None) -> Waiter:
        """Join, and remember what it took."""
        self.num_reserved_before_joining = self.num_reserved
        return await super().join_line(ticket, limit=limit)


async def test_a_fleet_that_never_holds_still_is_waited_for_in_line(world: World) -> None:
    await world.publish(lease("w"))
    router = SeesWorkersChange(
        world.redis,
        namespace=world.namespace,
        router_id="a",
        model=MODEL,
        lease_seconds=10.0,
        poll_seconds=600.0,
    )
    running = asyncio.create_task(router.run())
    asked = asyncio.create_task(placer(router).prefill(ticket(), block(), demand()))

    async def is_in_line() -> bool:
        return router.num_waiting_here() == 1

    try:
        async with asyncio.timeout(5.0):
            await until(is_in_line, "it stands in line")
        assert router.num_reserved_before_joining == 4, "the first look and three more"
        router.is_calm = True
        await world.redis.publish(world.keys.wake_channel, "worker")
        got = await asyncio.wait_for(asked, 10.0)
        await router.release(got.reservation)
        assert await world.is_empty()
    finally:
        asked.cancel()
        running.cancel()
        await asyncio.wait([asked, running])
        await router.aclose()
