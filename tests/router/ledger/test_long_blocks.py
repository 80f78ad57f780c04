"""Finding a place for what not every worker takes: too long, too large, or without KV."""

import asyncio

import pytest
from tests.router.ledger.test_placing import Running, prefill
from tests.router.ledger.world import World, block, demand, lease, placer, ticket

from sangam_core.errors import Unavailable
from sangam_core.placement import Role

pytestmark = pytest.mark.integration


async def test_a_request_that_nobody_could_take_holds_up_nobody(world: World) -> None:
    await world.publish(lease("p", role=Role.PREFILL), lease("d", role=Role.DECODE))
    router = world.router()
    place = placer(router, patience_seconds=600.0)
    async with Running(router):
        stuck = asyncio.create_task(prefill(place, 1, needs_colocated=True, num_pages=0))
        too_big = asyncio.create_task(prefill(place, 2, num_pages=101))
        others = [await asyncio.wait_for(prefill(place, number), 10.0) for number in (3, 4, 5)]
        assert {each.worker.worker_id for each in others} == {"p"}
        assert not stuck.done()
        assert not too_big.done()
        await world.publish(lease("c"))
        await world.redis.publish(world.keys.wake_channel, "c")
        assert (await asyncio.wait_for(stuck, 10.0)).worker.worker_id == "c"
        await world.publish(lease("q", role=Role.PREFILL, total_pages=200))
        await world.redis.publish(world.keys.wake_channel, "q")
        assert await asyncio.wait_for(prefill(place, 6), 10.0)
        assert not too_big.done(), "nobody could decode it"
        await world.publish(lease("e", role=Role.DECODE, total_pages=200))
        await world.redis.publish(world.keys.wake_channel, "q")
        assert (await asyncio.wait_for(too_big, 10.0)).worker.worker_id == "q"


async def test_long_and_short_blocks_go_where_each_is_taken(world: World) -> None:
    await world.publish(
        lease("short", max_sequence_tokens=1000), lease("long", max_sequence_tokens=4000)
    )
    router = world.router()
    place = placer(router)
    async with Running(router):
        for number in range(1, 9):
            length = 4000 if number % 2 else 1000
            got = await prefill(place, number, cost_tokens=length)
            decoded = await place.decode(
                ticket(f"d{number}"), block(f"d{number}"), demand(cost_tokens=length)
            )
            if length == 4000:
                assert got.worker.worker_id == decoded.worker.worker_id == "long"
            await router.release(got.reservation)
            await router.release(decoded.reservation)
    assert await world.is_empty()


async def test_a_block_that_is_too_long_for_all_waits_for_one_that_takes_it(world: World) -> None:
    await world.publish(lease("short", max_sequence_tokens=1000))
    router = world.router()
    place = placer(router, patience_seconds=600.0)
    async with Running(router):
        stuck = asyncio.create_task(prefill(place, 1, cost_tokens=1001))
        decode = asyncio.create_task(
            place.decode(ticket("d"), block("d"), demand("d", cost_tokens=1001))
        )
        others = [await asyncio.wait_for(prefill(place, number), 10.0) for number in (3, 4, 5)]
        assert {each.worker.worker_id for each in others} == {"short"}
        assert not stuck.done()
        assert not decode.done()
        await world.publish(lease("long", max_sequence_tokens=1001))
        await world.redis.publish(world.keys.wake_channel, "long")
        assert (await asyncio.wait_for(stuck, 10.0)).worker.worker_id == "long"
        assert (await asyncio.wait_for(decode, 10.0)).worker.worker_id == "long"


async def test_a_block_that_nobody_is_long_enough_for_is_told_its_length(world: World) -> None:
    await world.publish(lease("short", max_sequence_tokens=1000))
    router = world.router(poll_seconds=0.05)
    place = placer(router, patience_seconds=0.3)
    async with Running(router):
        with pytest.raises(Unavailable, match="could prefill the request, whose 1001 tokens"):
            await prefill(place, 1, cost_tokens=1001)
        with pytest.raises(Unavailable, match="could decode the request, whose 1001 tokens"):
            await place.decode(ticket("d"), block("d"), demand("d", cost_tokens=1001))
    assert await world.is_empty()
