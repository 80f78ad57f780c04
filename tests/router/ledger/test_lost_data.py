"""Redis comes back empty, answers late, or not at all."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from os import kill

import pytest
from tests.router.ledger.world import (
    World,
    block,
    demand,
    lease,
    load_of,
    reserve,
    reserved,
    ticket,
    until,
)

from sangam_core.errors import Unavailable
from sangam_router.ledger import Ledger, RefusalReason, Refused, Reservation
from sangam_router.ledger.connect import connect
from sangam_router.local.redis_server import RedisServer, running_redis

pytestmark = pytest.mark.integration


async def test_everything_held_is_put_back_after_redis_came_back_empty(world: World) -> None:
    await world.publish(lease("w"))
    a, b = world.router("a"), world.router("b")
    first, second = await reserved(a, "r1"), await reserved(b, "r2")
    await a.release_load(first)
    await a.join_line(ticket("old", 2.0))
    await b.join_line(ticket("young", 3.0))
    await b.join_decode_line(ticket("pending", 1.0), num_pages=6)

    answering_since = a.answering_since_seconds
    await world.empty()
    await world.publish(lease("w"))
    await b.heartbeat()
    await a.heartbeat()
    snapshot = await a.snapshot()
    load = load_of(snapshot)
    assert (load.outstanding_prefill_tokens, load.free_pages, load.num_blocks) == (64, 92, 2)
    assert snapshot.num_waiting == 2
    assert snapshot.fleet.pending_decode_pages == 6
    assert await reserve(b, "young", arrival_seconds=3.0) == Refused(RefusalReason.OLDER_WAITS)
    assert answering_since is not None
    assert a.answering_since_seconds is not None
    assert a.answering_since_seconds > answering_since

    await a.release(first)
    await b.release(second)
    for router, name, arrival in ((a, "old", 2.0), (b, "young", 3.0)):
        await router.leave_line(ticket(name, arrival))
    assert not (await world.audit()).differences


async def test_any_call_notices_that_redis_is_empty(world: World) -> None:
    await world.publish(lease("w"))
    router = world.router()
    await reserved(router, "r1")
    await world.empty()
    await world.publish(lease("w"))
    assert load_of(await router.snapshot()).free_pages == 96
    await world.empty()
    await world.publish(lease("w"))
    await router.join_line(ticket("r2"))
    assert len((await world.audit()).records) == 3


async def test_records_wait_for_their_worker_to_come_back(world: World) -> None:
    await world.publish(lease("w"), lease("v"))
    router = world.router()
    on_w, on_v = await reserved(router, "r1"), await reserved(router, "r2", worker_id="v")
    await world.empty()
    await world.publish(lease("v"))
    await router.heartbeat()
    assert {record.worker_id for record in (await world.audit()).records} == {"v"}
    await world.publish(lease("w"))
    await router.heartbeat()
    assert load_of(await router.snapshot(), "w").free_pages == 96
    await router.release(on_w)
    await router.release(on_v)
    assert await world.is_empty()


async def test_a_worker_that_restarted_with_redis_gets_no_old_records(world: World) -> None:
    await world.publish(lease("w"))
    router = world.router()
    old = await reserved(router)
    await world.empty()
    await world.publish(lease("w", epoch="w-2"))
    for _ in range(2):
        await router.heartbeat()
    assert await world.is_empty()
    await router.release(old)
    assert await world.is_empty()


async def test_restoring_twice_changes_nothing(world: World) -> None:
    await world.publish(lease("w"))
    router = world.router()
    held = [await reserved(router, f"r{number}", num_pages=1) for number in range(20)]
    await world.expire(router)
    await asyncio.gather(*(router.heartbeat() for _ in range(5)))
    assert load_of(await router.snapshot()).free_pages == 80
    assert not (await world.audit()).differences
    for each in held:
        await router.release(each)
    assert await world.is_empty()


async def test_a_stale_replica_that_took_over_is_mended(world: World) -> None:
    """Fail-over loses the last writes: here records made, and a deletion of others."""
    await world.publish(lease("w"))
    router = world.router()
    kept, gone = await reserved(router, "r1"), await reserved(router, "r2")
    prefix = world.keys.prefix
    records = f"{prefix}records:{router.owner}"
    place = "w\x1fw-1"
    deleted = {
        kind: await world.redis.hget(records, f"{gone.serial}:{kind}")
        for kind in ("pages", "blocks")
    }
    await router.release(gone)
    for kind, record in deleted.items():
        await world.redis.hset(records, f"{gone.serial}:{kind}", record)
    await world.redis.hincrby(f"{prefix}pages", place, 4)
    await world.redis.hdel(records, f"{kept.serial}:load", f"{kept.serial}:blocks")
    await world.redis.hdel(f"{prefix}load", place)
    assert not (await world.audit()).differences

    await router.heartbeat()
    load = load_of(await router.snapshot())
    assert (load.outstanding_prefill_tokens, load.free_pages, load.num_blocks) == (64, 96, 1)
    await router.release(kept)
    assert await world.is_empty()


@asynccontextmanager
async def own_server(*, is_cluster: bool = False) -> AsyncIterator[tuple[RedisServer, World]]:
    """A server of the test's own, to be maltreated."""
    with running_redis(is_cluster_node=is_cluster) as server:
        redis = connect(server.url, cluster=is_cluster, timeout_seconds=0.3)
        world = World(redis, "own")
        try:
            yield server, world
        finally:
            await world.aclose()
            await redis.aclose()


def is_up(router: Ledger) -> object:
    async def look() -> bool:
        try:
            await router.heartbeat()
        except Unavailable:
            return False
        return router.is_reachable

    return look


@pytest.mark.parametrize("is_cluster", [False, True], ids=["single", "cluster"])
async def test_kill_minus_nine_and_an_empty_restart(is_cluster: bool) -> None:
    async with own_server(is_cluster=is_cluster) as (server, world):
        await world.publish(lease("w"))
        a, b = world.router("a"), world.router("b")
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(router.run()) for router in (a, b)]
            held = await reserved(a, "r1")
            waiter = await b.join_line(ticket("waits", 2.0))
            server.kill()
            with pytest.raises(Unavailable, match="Redis cannot be used now"):
                await a.snapshot()
            assert not a.is_reachable
            await a.release_load(held)
            server.start()
            for router in (a, b):
                await until(is_up(router), "the router is back")
            await world.publish(lease("w"))

            async def is_restored() -> bool:
                await a.heartbeat()
                return load_of(await b.snapshot()).free_pages == 96

            await until(is_restored, "records are back")
            load = load_of(await b.snapshot())
            assert load.outstanding_prefill_tokens == 0
            await b.heartbeat()
            assert (await b.snapshot()).num_waiting == 1
            assert await waiter.wait(10.0)
            got = await reserve(b, "waits", arrival_seconds=2.0)
            assert isinstance(got, Reservation)
            await b.release(got)
            await a.release(held)
            for task in running:
                task.cancel()
        assert await world.is_empty()


async def test_releases_made_while_redis_was_away_are_made_up_for() -> None:
    async with own_server() as (server, world):
        await world.publish(lease("w"))
        router = world.router()
        held = [await reserved(router, f"r{number}") for number in range(3)]
        kill(server.pid, signal.SIGSTOP)
        try:
            await asyncio.gather(*(router.release(each) for each in held))
            assert not router.is_reachable
        finally:
            kill(server.pid, signal.SIGCONT)
        await until(is_up(router), "the router is back")
        assert await world.is_empty()


async def test_a_call_whose_reply_is_lost_leaves_nothing_behind() -> None:
    """Redis stands still; the call gives up; Redis goes on and carries it out all the same."""
    async with own_server() as (server, world):
        await world.publish(lease("w"))
        router = world.router()
        worker = load_of(await router.snapshot())
        kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable):
                await router.reserve_prefill(ticket(), block(), demand(), worker)
            with pytest.raises(Unavailable):
                await router.join_line(ticket("waits"))
            assert router.num_waiting_here() == 0
        finally:
            kill(server.pid, signal.SIGCONT)
        await until(is_up(router), "the router is back")
        assert await world.is_empty()


async def test_nothing_hangs_when_many_call_a_dead_redis() -> None:
    async with own_server() as (server, world):
        router = world.router()
        await router.heartbeat()
        kill(server.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(10.0):
                results = await asyncio.gather(
                    *(router.join_line(ticket(f"r{number}")) for number in range(300)),
                    return_exceptions=True,
                )
            assert {type(result) for result in results} == {Unavailable}
        finally:
            kill(server.pid, signal.SIGCONT)
        await until(is_up(router), "the router is back")
        assert await world.is_empty()
