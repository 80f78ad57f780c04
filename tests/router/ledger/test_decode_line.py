"""The line of prefilled blocks: who gets a place makes the next one look, on whichever router."""

import asyncio

import pytest
from tests.router.ledger.test_lines import reserve_decode
from tests.router.ledger.world import World, lease, ticket

from sangam_core.placement import Role
from sangam_router.ledger import Reservation

pytestmark = pytest.mark.integration


async def test_a_decode_that_gets_its_place_wakes_the_next_on_another_router(world: World) -> None:
    """Pages may be free for both, and nothing else would tell the second before its slow poll."""
    await world.publish(lease("w", role=Role.DECODE))
    a, b = world.router("a", poll_seconds=600.0), world.router("b", poll_seconds=600.0)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(router.run()) for router in (a, b)]
        first = await a.join_decode_line(ticket("r1", 1.0), num_pages=4)
        second = await b.join_decode_line(ticket("r2", 2.0), num_pages=4)
        for waiter in (first, second):  # signalled for being their routers' oldest
            while await waiter.wait(0.3):
                pass
        assert not isinstance(await reserve_decode(b, "r2", 2.0), Reservation)
        assert isinstance(await reserve_decode(a, "r1", 1.0), Reservation)
        assert await second.wait(10.0)
        assert isinstance(await reserve_decode(b, "r2", 2.0), Reservation)
        for task in running:
            task.cancel()
