"""The waiting lines: strict order over routers, limits, who is woken."""

import asyncio

import pytest
from tests.router.ledger.world import (
    World,
    block,
    demand,
    lease,
    load_of,
    reserve,
    ticket,
)

from sangam_core.errors import Overloaded
from sangam_core.wire import PROTOCOL_VERSION
from sangam_router.ledger import Ledger, Line, RefusalReason, Refused, Reservation

pytestmark = pytest.mark.integration

OLDER_WAITS = Refused(RefusalReason.OLDER_WAITS)


async def reserve_decode(router: Ledger, request_id: str, arrival: float) -> object:
    worker = load_of(await router.snapshot())
    return await router.reserve_decode(
        ticket(request_id, arrival), block(request_id), demand(request_id), worker
    )


async def test_a_younger_request_is_refused_while_an_older_one_waits_elsewhere(
    world: World,
) -> None:
    await world.publish(lease("w"))
    a, b = world.router("a"), world.router("b")
    await a.join_line(ticket("old", 1.0))
    assert await reserve(b, "young", arrival_seconds=2.0) == OLDER_WAITS
    assert OLDER_WAITS.must_wait
    assert isinstance(await reserve(b, "oldest", arrival_seconds=0.5), Reservation)
    assert isinstance(await reserve(a, "old", arrival_seconds=1.0), Reservation)
    assert isinstance(await reserve(b, "young", arrival_seconds=2.0), Reservation)


async def test_a_younger_request_is_refused_while_an_older_one_waits_here(world: World) -> None:
    await world.publish(lease("w"))
    router = world.router()
    await router.join_line(ticket("old", 1.0))
    assert await reserve(router, "young", arrival_seconds=2.0) == OLDER_WAITS


async def test_a_reservation_leaves_the_line(world: World) -> None:
    await world.publish(lease("w"))
    router = world.router()
    await router.join_line(ticket("r"))
    assert (await router.snapshot()).num_waiting == 1
    assert isinstance(await reserve(router, "r"), Reservation)
    assert (await router.snapshot()).num_waiting == 0
    assert router.num_waiting_here() == 0


async def test_requests_that_arrived_at_once_go_by_id_once_they_wait(world: World) -> None:
    await world.publish(lease("w"))
    a, b = world.router("a"), world.router("b")
    await a.join_line(ticket("r2", 1.0))
    assert await reserve(b, "r1", arrival_seconds=1.0) == OLDER_WAITS
    await b.join_line(ticket("r1", 1.0))
    assert await reserve(a, "r2", arrival_seconds=1.0) == OLDER_WAITS
    assert isinstance(await reserve(b, "r1", arrival_seconds=1.0), Reservation)
    assert isinstance(await reserve(a, "r2", arrival_seconds=1.0), Reservation)


async def test_joining_and_leaving_again_change_nothing(world: World) -> None:
    router = world.router()
    waiter = await router.join_line(ticket())
    assert await router.join_line(ticket()) is waiter
    assert (await router.snapshot()).num_waiting == 1
    await router.leave_line(ticket())
    await router.leave_line(ticket())
    assert (await router.snapshot()).num_waiting == 0
    assert await world.is_empty()


async def test_the_line_has_a_limit_over_all_routers(world: World) -> None:
    a, b = world.router("a"), world.router("b")
    await a.join_line(ticket("r1"), limit=2)
    await b.join_line(ticket("r2"), limit=2)
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        await b.join_line(ticket("r3"), limit=2)
    assert b.num_waiting_here() == 1
    await b.join_line(ticket("started"), limit=None)
    assert (await a.snapshot()).num_waiting == 3
    await a.join_line(ticket("r1"), limit=2)


async def test_an_entry_of_a_dead_router_holds_up_nobody(world: World) -> None:
    await world.publish(lease("w"))
    dead, alive = world.router("dead"), world.router("alive")
    await dead.join_line(ticket("old", 1.0))
    await dead.join_decode_line(ticket("old", 1.0), num_pages=90)
    await world.expire(dead)
    assert isinstance(await reserve_decode(alive, "young", 2.0), Reservation)
    assert (await alive.snapshot()).fleet.pending_decode_pages == 0
    assert isinstance(await reserve(alive, "young", arrival_seconds=2.0), Reservation)


async def test_the_two_lines_do_not_hold_each_other_up(world: World) -> None:
    await world.publish(lease("w"))
    a, b = world.router("a"), world.router("b")
    await a.join_line(ticket("old", 1.0))
    assert isinstance(await reserve_decode(b, "young", 2.0), Reservation)
    await a.join_decode_line(ticket("older", 0.5), num_pages=4)
    assert isinstance(await reserve(b, "oldest", arrival_seconds=0.1), Reservation)


async def test_pending_decodes_get_pages_strictly_in_order(world: World) -> None:
    await world.publish(lease("w", total_pages=10))
    a, b = world.router("a"), world.router("b")
    await a.join_decode_line(ticket("big", 1.0), num_pages=10)
    assert await reserve_decode(b, "small", 2.0) == OLDER_WAITS
    await a.leave_line(ticket("big", 1.0), Line.DECODE)
    assert isinstance(await reserve_decode(b, "small", 2.0), Reservation)
    assert await b.snapshot()
    assert not (await world.audit()).differences


async def test_lines_of_different_models_do_not_hold_each_other_up(world: World) -> None:
    await world.publish(lease("w"), lease("x", model="big"))
    small, big = world.router("a"), world.router("b", model="big")
    await small.join_line(ticket("old", 1.0))
    got = await reserve(big, "young", worker_id="x", arrival_seconds=2.0)
    assert isinstance(got, Reservation)


async def test_only_the_oldest_waiter_of_the_heads_router_is_woken(world: World) -> None:
    await world.publish(lease("w", total_pages=4))
    a, b = world.router("a", poll_seconds=600.0), world.router("b", poll_seconds=600.0)
    held = await reserve(a, "first", arrival_seconds=0.0)
    assert isinstance(held, Reservation)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(router.run()) for router in (a, b)]
        waiters = {
            name: await router.join_line(ticket(name, arrival))
            for router, name, arrival in ((a, "a2", 2.0), (b, "b1", 1.0), (b, "b3", 3.0))
        }
        await _settle(waiters["a2"], waiters["b1"])
        await a.release(held)
        assert await waiters["b1"].wait(10.0)
        assert isinstance(await reserve(b, "b1", arrival_seconds=1.0), Reservation)
        # b1 has left: the head is a's now, and b3 is the oldest of b.
        assert await waiters["a2"].wait(10.0)
        assert await waiters["b3"].wait(10.0)
        for task in running:
            task.cancel()


async def _settle(*oldest: object) -> None:
    """Let the waiters that are signalled for being the oldest, or by subscribing, look once."""
    for waiter in oldest:
        while await waiter.wait(0.3):  # type: ignore[attr-defined]
            pass


async def test_the_next_head_is_woken_when_one_gives_up(world: World) -> None:
    a, b = world.router("a", poll_seconds=600.0), world.router("b", poll_seconds=600.0)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(b.run())
        await a.join_line(ticket("old", 1.0))
        waiter = await b.join_line(ticket("young", 2.0))
        await _settle(waiter)
        await a.leave_line(ticket("old", 1.0))
        assert await waiter.wait(10.0)
        running.cancel()


async def test_a_worker_that_publishes_wakes_the_waiters(world: World) -> None:
    router = world.router(poll_seconds=600.0)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(router.run())
        waiter = await router.join_line(ticket())
        await _settle(waiter)
        await world.redis.publish(world.keys.wake_channel, "w")
        assert await waiter.wait(10.0)
        running.cancel()


async def test_without_any_message_the_slow_poll_wakes_the_oldest(world: World) -> None:
    router = world.router(poll_seconds=0.05)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(router.run())
        waiter = await router.join_line(ticket("old", 1.0))
        younger = await router.join_line(ticket("young", 2.0))
        for _ in range(3):
            assert await waiter.wait(10.0)
        assert not await younger.wait(0.0)
        running.cancel()


async def test_an_entry_that_nobody_waits_for_is_removed_by_its_own_router(world: World) -> None:
    await world.publish(lease("w"))
    a, b = world.router("a"), world.router("b")
    await a.heartbeat()
    line = f"{world.keys.prefix}line:prefill:{PROTOCOL_VERSION}:small"
    await world.redis.zadd(line, {f"ghost\x1f{a.owner}\x1f0": 0.5})
    await a.join_line(ticket("real", 1.0))
    assert await reserve(b, "young", arrival_seconds=2.0) == OLDER_WAITS
    await a.heartbeat()
    assert isinstance(await reserve(a, "real", arrival_seconds=1.0), Reservation)
    assert isinstance(await reserve(b, "young", arrival_seconds=2.0), Reservation)
