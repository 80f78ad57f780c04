"""Crashes at every await: whatever a task was doing, nothing of it stays in the ledger.

For every k a task is stopped at its k-th step. Cancelled (a client went away), it gives back
everything by itself. Frozen for ever while its router's lease expires (a process was killed), the
next heartbeat of another router clears up.
"""

import asyncio
import random
import signal
import sys
import textwrap
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.router.ledger.steps import Stepped, num_steps_of
from tests.router.ledger.world import World, block, demand, lease, load_of, placer, ticket, until

from sangam_core.placement import Role
from sangam_router.ledger import Ledger, Line, Reservation
from sangam_router.local.redis_server import RedisServer

pytestmark = pytest.mark.integration

Work = Callable[[Ledger], Coroutine[Any, Any, None]]


async def a_whole_block(router: Ledger) -> None:
    """Prefill on p, decode on d, everything released as the block goes on."""
    place = placer(router)
    sender = await place.prefill(ticket(), block(), demand())
    try:
        await router.release_load(sender.reservation)
        receiver = await place.decode(ticket(), block(), demand())
        try:
            await router.release(sender.reservation)
        finally:
            await router.release(receiver.reservation)
    finally:
        await router.release(sender.reservation)


async def from_the_lines(router: Ledger) -> None:
    """Joins both lines, gets a place from one, gives the other up; releases twice."""
    try:
        await router.join_line(ticket(), limit=5)
        await router.join_decode_line(ticket(), num_pages=4)
        worker = load_of(await router.snapshot(), "p")
        got = await router.reserve_prefill(ticket(), block(), demand(), worker)
        assert isinstance(got, Reservation)
        try:
            await router.release_load(got)
            await router.release_load(got)
        finally:
            await router.release(got)
            await router.release(got)
    finally:
        await router.leave_line(ticket())
        await router.leave_line(ticket(), Line.DECODE)


WORKS = [a_whole_block, from_the_lines]


async def publish(world: World) -> None:
    await world.publish(lease("p", role=Role.PREFILL), lease("d", role=Role.DECODE))


@pytest.mark.parametrize("work", WORKS)
async def test_a_task_cancelled_at_any_step_gives_everything_back(world: World, work: Work) -> None:
    await publish(world)
    num_steps = await num_steps_of(work(world.router()))
    num_cancelled = 0
    for step in range(num_steps):
        router = world.router()
        ended = await asyncio.create_task(Stepped(work(router), cancel_at=step).run())
        num_cancelled += not ended
        await router.aclose()
        assert not router.reservations, f"cancelled at step {step}"
        assert await world.is_empty(), f"cancelled at step {step}"
    assert num_cancelled > num_steps / 2


@pytest.mark.parametrize("work", WORKS)
async def test_a_router_killed_at_any_step_is_reaped(world: World, work: Work) -> None:
    await publish(world)
    num_steps = await num_steps_of(work(world.router()))
    num_frozen = num_with_leftovers = 0
    for step in range(num_steps):
        survivor, victim = world.router("survivor"), world.router("victim")
        stepped = Stepped(work(victim), freeze_at=step)
        task = asyncio.create_task(stepped.run())
        frozen = asyncio.create_task(stepped.frozen.wait())
        await asyncio.wait([task, frozen], return_when=asyncio.FIRST_COMPLETED)
        num_frozen += stepped.frozen.is_set()
        await victim.aclose()  # what had been sent is carried out
        num_with_leftovers += bool(await world.leftovers())
        await world.expire(victim)
        await survivor.heartbeat()
        assert await world.is_empty(), f"killed at step {step}"
        frozen.cancel()
        task.cancel()
        await asyncio.wait([task, frozen])
    assert num_frozen > num_steps / 2
    assert num_with_leftovers > 3


@pytest.mark.parametrize("work", WORKS)
async def test_redis_emptied_at_any_step_is_made_up_for(world: World, work: Work) -> None:
    num_steps = await num_steps_of(_published_first(world, work))
    for step in range(num_steps):
        await publish(world)
        router = world.router()
        stepped = Stepped(work(router), freeze_at=step)
        task = asyncio.create_task(stepped.run())
        frozen = asyncio.create_task(stepped.frozen.wait())
        await asyncio.wait([task, frozen], return_when=asyncio.FIRST_COMPLETED)
        await world.empty()
        await publish(world)
        await router.heartbeat()
        assert not (await world.audit()).differences, f"emptied at step {step}"
        frozen.cancel()
        task.cancel()
        await asyncio.wait([task, frozen])
        await router.aclose()
        assert await world.is_empty(), f"emptied at step {step}"


async def _published_first(world: World, work: Work) -> None:
    await publish(world)
    await work(world.router())


VICTIM = """
    import asyncio, random, sys
    from sangam_core.placement import PlacementPolicy
    from tests.router.ledger.world import block, demand, placer, ticket
    from sangam_router.ledger import Ledger
    from sangam_router.ledger.connect import connect

    async def requests(router, name):
        place = placer(router, PlacementPolicy(theta_tokens=200.0), patience_seconds=60.0)
        for number in range(1_000_000):
            key = f"{name}-{number}"
            sender = await place.prefill(ticket(key, number), block(key), demand(key, 10))
            await router.release_load(sender.reservation)
            receiver = await place.decode(ticket(key, number), block(key), demand(key, 10))
            await router.release(sender.reservation)
            await router.release(receiver.reservation)

    async def main(url, namespace):
        router = Ledger(
            connect(url, timeout_seconds=2.0), namespace=namespace, router_id="victim",
            model="small", lease_seconds=1.0, poll_seconds=1.0, counts_blocks=True,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(router.run())
            for n in range(12):
                group.create_task(requests(router, f"r{n}"))

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.timeout(300)
async def test_router_processes_killed_at_random_moments_leave_nothing(
    redis_server: RedisServer, world: World
) -> None:
    """Two routers of real processes contend for 3 places; both are killed in full flight."""
    await world.publish(
        lease("p", role=Role.PREFILL, total_pages=30),
        lease("d", role=Role.DECODE, total_pages=30),
    )
    survivor = world.router("survivor")
    chance = random.Random(7)
    for _ in range(2):
        victims = [
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                textwrap.dedent(VICTIM),
                redis_server.url,
                world.namespace,
                cwd=Path.cwd(),
            )
            for _ in range(2)
        ]

        async def both_work(owners: int = 2) -> bool:
            found = await world.audit()
            assert not found.differences
            return len({record.owner for record in found.records}) == owners

        await until(both_work, "both hold reservations")
        await asyncio.sleep(chance.uniform(0.0, 0.2))
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
            await victim.wait()

        async def is_reaped() -> bool:
            await survivor.heartbeat()
            return await world.is_empty()

        await until(is_reaped, "the dead are reaped")
