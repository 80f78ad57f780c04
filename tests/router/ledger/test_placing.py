"""Finding a place: order under contention, futile waits, patience, and how little is asked."""

import asyncio

import pytest
from tests.router.ledger.world import (
    MODEL,
    World,
    block,
    demand,
    lease,
    placer,
    reserved,
    ticket,
    until,
)

from sangam_core.errors import Overloaded, Unavailable
from sangam_core.placement import PlacementPolicy, Role
from sangam_router.fleet import FleetView
from sangam_router.ledger import FleetSnapshot, Ledger, Line, Ticket
from sangam_router.ledger.connect import connect
from sangam_router.ledger.placing import Placement, Placer
from sangam_router.ledger.scripts import Client
from sangam_router.ledger.waiting import Waiter
from sangam_router.local.redis_server import RedisServer, running_redis

pytestmark = pytest.mark.integration


class Running:
    """Routers whose background work runs for the length of a test."""

    def __init__(self, *routers: Ledger) -> None:
        self._routers = routers
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.create_task(router.run()) for router in self._routers]

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


async def prefill(place: Placer, number: int, **changes: object) -> Placement:
    name = f"r{number:04}"
    num_pages = changes.pop("num_pages", 4)
    of_demand = {
        what: changes.pop(what)
        for what in ("needs_colocated", "is_new", "cost_tokens")
        if what in changes
    }
    return await place.prefill(
        ticket(name, float(number)),
        block(name),
        demand(name, num_pages, **of_demand),  # type: ignore[arg-type]
        **changes,  # type: ignore[arg-type]
    )


async def num_waiting(world: World, count: int) -> None:
    watcher = world.router("watcher")

    async def are_waiting() -> bool:
        return (await watcher.snapshot()).num_waiting == count

    await until(are_waiting, f"{count} wait")


async def test_requests_get_their_places_in_order_of_arrival_over_routers(world: World) -> None:
    await world.publish(lease("w", total_pages=8))
    a, b = world.router("a", poll_seconds=600.0), world.router("b", poll_seconds=600.0)
    order: list[int] = []

    async def request(router: Ledger, number: int) -> None:
        got = await prefill(placer(router, patience_seconds=600.0), number)
        order.append(number)
        await router.release(got.reservation)

    async with Running(a, b):
        first = [await reserved(a, f"held{n}", arrival_seconds=0.0) for n in range(2)]
        async with asyncio.TaskGroup() as group:
            for number in (7, 3, 9, 1, 8, 2, 6, 4, 5, 10):
                group.create_task(request(a if number % 3 else b, number))
            await num_waiting(world, 10)
            for each in first:
                await a.release(each)
    # Two places are free at a time, so neighbours may finish in either order.
    assert all(abs(place - number) <= 1 for place, number in enumerate(order, 1)), order
    assert await world.is_empty()


async def test_a_thousand_waiters_ask_redis_hardly_more_than_ten_do(world: World) -> None:
    await world.publish(lease("w", total_pages=4))
    a, b = world.router("a", poll_seconds=600.0), world.router("b", poll_seconds=600.0)
    async with Running(a, b):
        held = await reserved(a, "held", arrival_seconds=0.0)
        waiting = [
            asyncio.create_task(prefill(placer((a, b)[number % 2]), number))
            for number in range(1, 1001)
        ]
        await num_waiting(world, 1000)
        before = await num_scripts(world)
        await a.release(held)
        for number, task in enumerate(waiting[:20]):
            got = await asyncio.wait_for(task, 20.0)
            await (a, b)[(number + 1) % 2].release(got.reservation)
        spent = await num_scripts(world) - before
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
    assert spent / 20 < 15
    for router in (a, b):
        await router.aclose()
        for left in router.reservations:
            await router.release(left)
    assert await world.is_empty()


async def num_scripts(world: World) -> int:
    statistics = await world.redis.info("commandstats")
    return int(statistics["cmdstat_evalsha"]["calls"])


async def test_a_full_line_turns_new_requests_away(world: World) -> None:
    await world.publish(lease("w", total_pages=4))
    router = world.router()
    await reserved(router, arrival_seconds=0.0)
    waiting = asyncio.create_task(prefill(placer(router), 1, line_limit=1))
    await num_waiting(world, 1)
    with pytest.raises(Overloaded, match="1 requests are waiting"):
        await prefill(placer(router), 2, line_limit=1)
    waiting.cancel()
    await asyncio.wait([waiting])
    await num_waiting(world, 0)


async def test_a_decode_that_nobody_could_take_leaves_its_pages_to_prefills(
    world: World,
) -> None:
    await world.publish(lease("c", total_pages=10))
    router = world.router()
    place = placer(router, patience_seconds=600.0)
    async with Running(router):
        stuck = asyncio.create_task(place.decode(ticket("big"), block("big"), demand("big", 11)))
        got = await asyncio.wait_for(prefill(place, 2, num_pages=10), 10.0)
        assert not stuck.done()
        stuck.cancel()
        await asyncio.wait([stuck])
        await router.release(got.reservation)
    assert await world.is_empty()


async def test_without_workers_patience_ends_and_says_why(world: World) -> None:
    router = world.router(poll_seconds=0.05)
    async with Running(router):
        with pytest.raises(Unavailable, match=r"no worker is ready; waited 0\.3 seconds"):
            await prefill(placer(router, patience_seconds=0.3), 1)
    assert await world.is_empty()


async def test_patience_ends_for_those_who_are_not_called_as_well(world: World) -> None:
    router = world.router(poll_seconds=0.05)
    async with Running(router):
        place = placer(router, patience_seconds=0.3)
        async with asyncio.timeout(10.0):
            results = await asyncio.gather(
                *(prefill(place, number) for number in range(5)), return_exceptions=True
            )
    assert {type(result) for result in results} == {Unavailable}
    assert await world.is_empty()


async def test_a_worker_that_comes_within_the_patience_is_used(world: World) -> None:
    router = world.router()
    async with Running(router):
        waiting = asyncio.create_task(prefill(placer(router, patience_seconds=30.0), 1))
        await num_waiting(world, 1)
        await world.publish(lease("w"))
        await world.redis.publish(world.keys.wake_channel, "w")
        assert (await asyncio.wait_for(waiting, 10.0)).worker.worker_id == "w"


async def test_a_full_fleet_is_waited_for_beyond_the_patience(world: World) -> None:
    await world.publish(lease("w", total_pages=4))
    router = world.router(poll_seconds=0.05)
    held = await reserved(router, arrival_seconds=0.0)
    async with Running(router):
        waiting = asyncio.create_task(prefill(placer(router, patience_seconds=0.1), 1))
        await num_waiting(world, 1)
        await asyncio.wait([waiting], timeout=0.5)
        assert not waiting.done()
        await router.release(held)
        await asyncio.wait_for(waiting, 10.0)


async def test_requests_outlive_a_redis_restart_within_their_patience() -> None:
    with running_redis() as server:
        redis = connect(server.url, timeout_seconds=0.3)
        world = World(redis, "restart")
        await world.publish(lease("w", total_pages=4))
        router = world.router(poll_seconds=0.1)
        async with Running(router):
            await reserved(router, arrival_seconds=0.0)
            place = placer(router, patience_seconds=30.0)
            waiting = [asyncio.create_task(prefill(place, number)) for number in (1, 2)]
            await num_waiting(world, 2)
            server.kill()
            with pytest.raises(Unavailable, match="Redis cannot be used now"):
                await prefill(place, 3, patience_seconds=0.2)
            fresh = asyncio.create_task(prefill(place, 4))
            server.start()
            await world.publish(lease("w", total_pages=4))

            async def all_wait() -> bool:
                return router.num_waiting_here() == 3 and (
                    (await router.snapshot()).num_waiting == 3
                )

            await until(all_wait, "the line is back")
            for task in (*waiting, fresh):
                held = router.reservations[0]
                await router.release(held)
                await asyncio.wait_for(task, 20.0)
            await router.release(router.reservations[0])
        assert await world.is_empty()
        await world.aclose()
        await redis.aclose()


class LosesRedisBeforeJoining(Ledger):
    """Its server dies between the first look and the joining of the line."""

    def __init__(self, server: RedisServer, redis: Client) -> None:
        settings = {"lease_seconds": 10.0, "poll_seconds": 0.1}
        super().__init__(redis, namespace="unlucky", router_id="a", model=MODEL, **settings)
        self._server = server
        self._has_lost_redis = False
        self.has_failed_to_join = asyncio.Event()

    async def join_line(self, ticket: Ticket, *, limit: int | None = None) -> Waiter:
        """Join, the first time in vain."""
        if not self._has_lost_redis:
            self._has_lost_redis = True
            self._server.kill()
        try:
            return await super().join_line(ticket, limit=limit)
        except Unavailable:
            self.has_failed_to_join.set()
            raise


async def test_a_request_outlives_a_redis_that_dies_between_its_look_and_its_joining() -> None:
    with running_redis() as server:
        redis = connect(server.url, timeout_seconds=0.3)
        world = World(redis, "unlucky")
        await world.publish(lease("w", total_pages=4))
        router = LosesRedisBeforeJoining(server, redis)
        held = await reserved(router, arrival_seconds=0.0)
        async with Running(router):
            waiting = asyncio.create_task(prefill(placer(router, patience_seconds=30.0), 1))
            await router.has_failed_to_join.wait()
            server.start()
            await world.publish(lease("w", total_pages=4))
            await num_waiting(world, 1)
            await router.release(held)
            placement = await asyncio.wait_for(waiting, 20.0)
            await router.release(placement.reservation)
        assert await world.is_empty()
        await router.aclose()
        await world.aclose()
        await redis.aclose()


class SwallowsCancellations(Ledger):
    """As a call of Redis does that breaks off in the moment in which it is cancelled."""

    def __init__(self, redis: Client) -> None:
        settings = {"lease_seconds": 10.0, "poll_seconds": 0.1}
        super().__init__(redis, namespace="deaf", router_id="a", model=MODEL, **settings)
        self.num_calls = 0

    async def heartbeat(self) -> None:
        await self._fails()

    async def snapshot(self) -> FleetSnapshot:
        await self._fails()
        raise AssertionError

    async def _fails(self) -> None:
        self.num_calls += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Unavailable("broken off") from None


async def test_what_runs_in_the_background_ends_though_a_call_swallows_its_cancellation() -> None:
    redis = connect("redis://127.0.0.1:1/0", timeout_seconds=0.3)
    router = SwallowsCancellations(redis)
    fleet = FleetView(router, policy=PlacementPolicy(), worker_lease_seconds=5.0)
    news = asyncio.create_task(router._follow_news())
    router._news.set()
    tasks = [
        asyncio.create_task(router._heartbeats()),
        asyncio.create_task(fleet.run(refresh_seconds=60.0)),
        asyncio.create_task(prefill(placer(router, patience_seconds=60.0), 1)),
        news,
    ]

    async def all_call() -> bool:
        return router.num_calls == len(tasks)

    await until(all_call, "all of them call")
    for task in tasks:
        task.cancel()
    _, pending = await asyncio.wait(tasks, timeout=2.0)
    assert not pending
    assert all(task.cancelled() for task in tasks)
    await redis.aclose()


async def test_avoided_workers_are_taken_only_where_no_other_has_room(world: World) -> None:
    await world.publish(lease("bad"), lease("good", total_pages=4))
    router = world.router()
    place = placer(router)
    first = await prefill(place, 1, avoid={"bad-1"})
    second = await prefill(place, 2, avoid={"bad-1"})
    assert (first.worker.worker_id, second.worker.worker_id) == ("good", "bad")
    decode = await place.decode(ticket("d"), block("d"), demand("d", 1), avoid={"bad-1"})
    assert decode.worker.worker_id == "bad"


async def test_the_placement_tells_where_to_go(world: World) -> None:
    await world.publish(lease("w", url="http://10.0.0.7:21034"))
    got = await prefill(placer(world.router()), 1)
    assert got.lease.url == "http://10.0.0.7:21034"
    assert got.worker.role is Role.COLOCATED
    assert got.reservation.key == block("r0001")


async def test_a_burst_overflows_to_the_colocated_worker_as_single_requests_would(
    world: World,
) -> None:
    """Of 64 tokens each, p takes two until it has reached theta, then c two; the rest waits."""
    await world.publish(lease("p", role=Role.PREFILL), lease("c"))
    router = world.router(poll_seconds=600.0)
    place = placer(router, PlacementPolicy(theta_tokens=128.0), patience_seconds=600.0)
    async with Running(router):
        burst = [asyncio.create_task(prefill(place, number)) for number in range(6)]
        await num_waiting(world, 2)
        placed = [(await asyncio.wait_for(task, 10.0)).worker.worker_id for task in burst[:4]]
        assert placed == ["p", "p", "c", "c"]
        await router.release_load(burst[3].result().reservation)
        assert (await asyncio.wait_for(burst[4], 10.0)).worker.worker_id == "c"
        await router.release_load(burst[0].result().reservation)
        assert (await asyncio.wait_for(burst[5], 10.0)).worker.worker_id == "p"


async def test_new_requests_wait_for_a_bounded_fleet_and_those_that_have_begun_do_not(
    world: World,
) -> None:
    """Of two routers: each sees in Redis what the other holds."""
    await world.publish(lease("w"))
    policy = PlacementPolicy(max_blocks_per_decoder=2)
    a, b = world.router("a", poll_seconds=600.0), world.router("b", poll_seconds=600.0)
    places = [placer(router, policy, patience_seconds=600.0) for router in (a, b)]
    async with Running(a, b):
        held = [await prefill(place, number, is_new=True) for number, place in enumerate(places)]
        waiting = asyncio.create_task(prefill(places[1], 9, is_new=True))
        await num_waiting(world, 1)
        begun = await asyncio.wait_for(prefill(places[1], 3), 10.0)
        await b.release(begun.reservation)
        assert not waiting.done()
        await a.release(held[0].reservation)
        got = await asyncio.wait_for(waiting, 10.0)
        for router, each in ((b, held[1]), (b, got)):
            await router.release(each.reservation)
    assert await world.is_empty()


async def test_a_bounded_fleet_counts_blocks_of_any_size_as_one(world: World) -> None:
    """A long one is a single block to a short one, and short ones fill a fleet for a long one."""
    await world.publish(lease("w"))
    router = world.router(poll_seconds=600.0)
    place = placer(router, PlacementPolicy(max_blocks_per_decoder=2), patience_seconds=600.0)
    async with Running(router):
        long = await prefill(place, 1, num_pages=60, is_new=True)
        short = await asyncio.wait_for(prefill(place, 2, num_pages=1, is_new=True), 10.0)
        waiting = asyncio.create_task(prefill(place, 3, num_pages=30, is_new=True))
        await num_waiting(world, 1)
        await router.release(short.reservation)
        got = await asyncio.wait_for(waiting, 10.0)
        for each in (long, got):
            await router.release(each.reservation)
    assert await world.is_empty()


async def test_a_bound_below_one_block_lets_new_requests_in_one_at_a_time(world: World) -> None:
    await world.publish(lease("p", role=Role.PREFILL), lease("d", role=Role.DECODE))
    router = world.router(poll_seconds=600.0)
    place = placer(router, PlacementPolicy(max_blocks_per_decoder=0.01), patience_seconds=600.0)
    async with Running(router):
        asked = [asyncio.create_task(prefill(place, number, is_new=True)) for number in range(5)]
        for number, task in enumerate(asked):
            got = await asyncio.wait_for(task, 10.0)
            await num_waiting(world, 4 - number)
            await router.release(got.reservation)
    assert await world.is_empty()


async def test_a_cancelled_search_leaves_the_line(world: World) -> None:
    await world.publish(lease("w", total_pages=4))
    router = world.router()
    held = await reserved(router, arrival_seconds=0.0)
    place = placer(router)
    for line, search in (
        (Line.PREFILL, prefill(place, 1)),
        (Line.DECODE, place.decode(ticket("d"), block("d"), demand("d"))),
    ):
        task = asyncio.create_task(search)

        async def is_in_line(line: Line = line) -> bool:
            return router.num_waiting_here(line) == 1

        await until(is_in_line, f"it stands in the {line} line")
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    await router.release(held)
    assert await world.is_empty()
