"""Who expires is reaped, by whoever notices first, exactly once."""

import asyncio

import pytest
from tests.router.ledger.world import (
    World,
    demand,
    lease,
    load_of,
    reserve,
    reserved,
    ticket,
    until,
)

from sangam_core.placement import Role
from sangam_core.wire import PROTOCOL_VERSION
from sangam_router.ledger import Line, Reservation

pytestmark = pytest.mark.integration


async def test_a_dead_routers_records_and_entries_are_reaped(world: World) -> None:
    await world.publish(lease("w"))
    dead, alive = world.router("dead"), world.router("alive")
    for number in range(3):
        await reserved(dead, f"r{number}")
    await dead.join_line(ticket("waits"))
    await dead.join_decode_line(ticket("waits"), num_pages=5)
    kept = await reserved(alive, "kept", arrival_seconds=0.5)
    await world.expire(dead)
    await alive.heartbeat()

    left = load_of(await alive.snapshot())
    assert (left.outstanding_prefill_tokens, left.free_pages, left.num_blocks) == (64, 96, 1)
    await alive.release(kept)
    assert await world.is_empty()


async def test_several_routers_that_notice_at_once_reap_once(world: World) -> None:
    await world.publish(lease("w"))
    dead = world.router("dead")
    await reserved(dead)
    routers = [world.router(name) for name in "abcd"]
    for router in routers:
        await router.heartbeat()
    await world.expire(dead)
    await asyncio.gather(*(router.heartbeat() for router in routers))
    assert await world.is_empty()


async def test_a_lost_workers_records_are_reaped_whoever_made_them(world: World) -> None:
    await world.publish(lease("w"), lease("v"))
    a, b = world.router("a"), world.router("b")
    await reserved(a, "r1")
    await reserved(b, "r2")
    kept = await reserved(b, "r3", worker_id="v")
    await world.lose("w")
    await a.heartbeat()
    assert {record.worker_id for record in (await world.audit()).records} == {"v"}
    assert not await world.redis.sismember(world.keys.workers, "w")
    await b.release(kept)
    assert await world.is_empty()


async def test_a_lost_worker_s_blocks_without_kv_are_reaped_with_it(world: World) -> None:
    """They have a load record alone, and nothing of pages points to their worker."""
    await world.publish(lease("w"))
    router = world.router()
    await reserved(router, num_pages=0, cost_tokens=50, needs_colocated=True)
    await world.lose("w")
    await router.heartbeat()
    assert await world.is_empty()


async def test_a_worker_back_with_a_new_epoch_starts_from_nothing(world: World) -> None:
    await world.publish(lease("w"))
    router = world.router()
    old = await reserved(router, "r1", num_pages=90)
    await world.publish(lease("w", epoch="w-2"))
    fresh = load_of(await router.snapshot())
    assert (fresh.outstanding_prefill_tokens, fresh.free_pages, fresh.num_blocks) == (0, 100, 0)

    new = await reserved(router, "r2", num_pages=50)
    await router.heartbeat()
    await router.release(old)
    left = load_of(await router.snapshot())
    assert (left.outstanding_prefill_tokens, left.free_pages, left.num_blocks) == (800, 50, 1)
    await router.release(new)
    assert await world.is_empty()


async def test_a_heartbeat_does_not_bring_back_what_was_reaped_with_a_worker(
    world: World,
) -> None:
    await world.publish(lease("w"))
    router = world.router()
    await reserved(router)
    await world.lose("w")
    for _ in range(2):
        await router.heartbeat()
    assert await world.is_empty()
    await world.publish(lease("w", epoch="w-2"))
    await router.heartbeat()
    assert await world.is_empty()


async def test_a_worker_whose_lease_lapsed_briefly_gets_its_records_back(world: World) -> None:
    await world.publish(lease("w"))
    a, b = world.router("a"), world.router("b")
    got = await reserved(a)
    await world.lose("w")
    await b.heartbeat()
    assert await world.is_empty()
    await world.publish(lease("w"))
    await a.heartbeat()
    assert load_of(await b.snapshot()).free_pages == 96
    await a.release(got)
    assert await world.is_empty()


async def test_a_router_that_was_taken_for_dead_puts_back_what_it_holds(world: World) -> None:
    await world.publish(lease("w"))
    paused, alive = world.router("paused"), world.router("alive")
    got = await reserved(paused, "r1")
    half = await reserved(paused, "r2")
    await paused.release_load(half)
    waiter = await paused.join_line(ticket("waits", 2.0))
    await world.expire(paused)
    await alive.heartbeat()
    assert await world.is_empty()

    await paused.heartbeat()
    load = load_of(await alive.snapshot())
    assert (load.outstanding_prefill_tokens, load.free_pages, load.num_blocks) == (64, 92, 2)
    assert (await alive.snapshot()).num_waiting == 1
    assert paused.num_waiting_here() == 1
    assert waiter.ticket == ticket("waits", 2.0)
    await paused.release(got)
    await paused.release(half)
    await paused.leave_line(ticket("waits", 2.0))
    assert await world.is_empty()


async def test_a_restarted_router_does_not_inherit_from_its_predecessor(world: World) -> None:
    await world.publish(lease("w"))
    before, after = world.router("same-name"), world.router("same-name")
    await reserved(before)
    await after.heartbeat()
    assert len((await world.audit()).records) == 3
    await world.expire(before)
    await after.heartbeat()
    assert await world.is_empty()


async def test_reaping_wakes_the_waiters(world: World) -> None:
    await world.publish(lease("w", total_pages=4))
    dead = world.router("dead")
    router = world.router("alive", poll_seconds=600.0, lease_seconds=3.0)
    await reserved(dead, arrival_seconds=0.0)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(router.run())
        waiter = await router.join_line(ticket("waits", 2.0))
        await world.expire(dead)
        got = None
        while not isinstance(got, Reservation):
            assert await waiter.wait(20.0)
            got = await reserve(router, "waits", arrival_seconds=2.0)
        running.cancel()


async def test_leases_expire_by_themselves(world: World) -> None:
    await world.publish(lease("w"))
    mortal, alive = world.router("mortal", lease_seconds=0.5), world.router("alive")
    await reserved(mortal)
    owner_key = f"{world.keys.prefix}router:{mortal.owner}"
    assert 0 < await world.redis.pttl(owner_key) <= 500

    async def has_expired() -> bool:
        return not await world.redis.exists(owner_key)

    await until(has_expired, "the lease has expired")
    await alive.heartbeat()
    assert await world.is_empty()


async def test_the_audit_reports_a_counter_that_is_not_the_sum_of_its_records(
    world: World,
) -> None:
    await world.publish(lease("p", role=Role.PREFILL))
    router = world.router()
    await reserved(router, worker_id="p", num_pages=4)
    await router.join_decode_line(ticket(), num_pages=4)
    assert not (await world.audit()).differences
    prefix = world.keys.prefix
    await world.redis.hincrby(f"{prefix}load", "p\x1fp-1", 7)
    await world.redis.hdel(f"{prefix}pages", "p\x1fp-1")
    service = f"{PROTOCOL_VERSION}:small"
    await world.redis.hset(f"{prefix}pending_pages", service, 5)
    found = (await world.audit()).differences
    assert [(d.counter, d.field, d.counted, d.recorded) for d in found] == [
        ("load", ("p", "p-1"), 71, 64),
        ("pages", ("p", "p-1"), 0, 4),
        ("pending_pages", (service,), 5, 4),
    ]
    assert demand().num_pages == 4
    await router.leave_line(ticket(), Line.DECODE)
