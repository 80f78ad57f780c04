"""Reserving and releasing: what the scripts check, and that counters follow the records."""

import asyncio
import math
from dataclasses import replace

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
)

from sangam_core.placement import Role, WorkerLoad
from sangam_router.ledger import Ledger, Line, RefusalReason, Refused, Reservation

pytestmark = pytest.mark.integration


async def test_a_prefill_takes_tokens_and_pages_until_each_is_released(world: World) -> None:
    await world.publish(lease("w"))
    router = world.router()
    got = await reserved(router, num_pages=4, cost_tokens=60)

    taken = load_of(await router.snapshot())
    assert (taken.outstanding_prefill_tokens, taken.free_pages, taken.num_blocks) == (60, 96, 1)
    await router.release_load(got)
    ran = load_of(await router.snapshot())
    assert (ran.outstanding_prefill_tokens, ran.free_pages, ran.num_blocks) == (0, 96, 1)
    await router.release(got)
    ended = load_of(await router.snapshot())
    assert (ended.outstanding_prefill_tokens, ended.free_pages, ended.num_blocks) == (0, 100, 0)
    assert await world.is_empty()


async def test_releasing_twice_changes_nothing(world: World) -> None:
    await world.publish(lease("w"))
    router = world.router()
    first, second = await reserved(router, "r1"), await reserved(router, "r2")
    for _ in range(3):
        await asyncio.gather(router.release(first), router.release(first))
        await router.release_load(first)
    left = load_of(await router.snapshot())
    assert (left.outstanding_prefill_tokens, left.free_pages, left.num_blocks) == (64, 96, 1)
    await router.release(second)
    assert await world.is_empty()


async def test_records_say_who_holds_what_where(world: World) -> None:
    await world.publish(lease("w"))
    router = world.router("a")
    await reserved(router, "r", num_pages=4, cost_tokens=60)
    found = {record.kind: record for record in (await world.audit()).records}
    assert {kind: record.amount for kind, record in found.items()} == {
        "load": 60,
        "pages": 4,
        "blocks": 1,
    }
    for record in found.values():
        assert record.owner == router.owner
        assert record.owner.startswith("a.")
        assert (record.worker_id, record.epoch) == ("w", "w-1")
        assert record.block_key == str(block("r"))


async def test_a_router_whose_placement_counts_no_blocks_makes_no_records_of_them(
    world: World,
) -> None:
    await world.publish(lease("w"))
    router = world.router(counts_blocks=False)
    await reserved(world.router("counts"), "r1")
    got = await reserved(router, "r2")
    mine = [r for r in (await world.audit()).records if r.owner == router.owner]
    assert sorted(record.kind for record in mine) == ["load", "pages"]
    assert load_of(await router.snapshot()).num_blocks == 0
    assert got.num_blocks == 0


async def test_blocks_are_counted_over_routers_whatever_their_sizes(world: World) -> None:
    await world.publish(lease("w"), lease("v"))
    a, b = world.router("a"), world.router("b")
    long, short = await reserved(a, "r1", num_pages=60), await reserved(b, "r2", num_pages=1)
    await reserved(b, "r3", worker_id="v", num_pages=7)
    for router in (a, b):
        snapshot = await router.snapshot()
        assert [load_of(snapshot, name).num_blocks for name in "wv"] == [2, 1]
    await a.release(long)
    assert load_of(await b.snapshot()).num_blocks == 1
    await b.release(short)
    assert load_of(await a.snapshot()).num_blocks == 0


async def test_a_block_without_kv_takes_tokens_only(world: World) -> None:
    await world.publish(lease("w"))
    router = world.router()
    got = await reserved(router, num_pages=0, cost_tokens=50, needs_colocated=True)
    load = load_of(await router.snapshot())
    assert (load.outstanding_prefill_tokens, load.free_pages, load.num_blocks) == (50, 100, 0)
    await router.release_load(got)
    assert await world.is_empty()


async def test_sender_and_receiver_hold_pages_of_the_same_block_independently(
    world: World,
) -> None:
    await world.publish(lease("p", role=Role.PREFILL), lease("d", role=Role.DECODE))
    router = world.router()
    sender = await reserved(router, worker_id="p", num_pages=4)
    await router.release_load(sender)
    receiver = await router.reserve_decode(
        ticket(), block(), demand(num_pages=4), load_of(await router.snapshot(), "d")
    )
    assert isinstance(receiver, Reservation)
    await router.release(sender)
    after = await router.snapshot()
    assert load_of(after, "p").free_pages == 100
    assert load_of(after, "d").free_pages == 96
    assert load_of(after, "d").outstanding_prefill_tokens == 0
    await router.release(receiver)
    assert await world.is_empty()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epoch": "w-2"}, RefusalReason.WORKER_CHANGED),
        ({"is_draining": True}, RefusalReason.DRAINING),
        ({"role": Role.PREFILL}, RefusalReason.WRONG_ROLE),
        ({"model": "other"}, RefusalReason.INCOMPATIBLE),
        ({"protocol": 99}, RefusalReason.INCOMPATIBLE),
        ({"total_pages": 3}, RefusalReason.NO_PAGES),
    ],
)
async def test_a_worker_that_changed_since_the_snapshot_refuses(
    world: World, changes: dict[str, object], reason: RefusalReason
) -> None:
    await world.publish(lease("w"))
    router = world.router()
    stale = load_of(await router.snapshot())
    await world.publish(lease("w", **changes))
    got = await router.reserve_prefill(ticket(), block(), demand(num_pages=4), stale)
    assert got == Refused(reason)
    decode = await router.reserve_decode(ticket(), block(), demand(num_pages=4), stale)
    assert decode == Refused(reason)
    assert not got.must_wait
    assert await world.is_empty()


async def test_a_worker_without_a_lease_refuses(world: World) -> None:
    await world.publish(lease("w"))
    router = world.router()
    stale = load_of(await router.snapshot())
    await world.lose("w")
    got = await router.reserve_prefill(ticket(), block(), demand(), stale)
    assert got == Refused(RefusalReason.WORKER_GONE)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_role_refuses_the_work_of_the_other(world: World, role: Role) -> None:
    await world.publish(lease("w", role=role))
    router = world.router()
    worker = load_of(await router.snapshot())
    if role is Role.DECODE:
        got = await router.reserve_prefill(ticket(), block(), demand(), worker)
    else:
        got = await router.reserve_decode(ticket(), block(), demand(), worker)
    assert got == Refused(RefusalReason.WRONG_ROLE)


async def test_pages_are_never_promised_twice_over_routers(world: World) -> None:
    await world.publish(lease("w", total_pages=10))
    routers = [world.router(name) for name in "abc"]
    stale = load_of(await routers[0].snapshot())
    got = await asyncio.gather(
        *(
            routers[n % 3].reserve_prefill(
                ticket(f"r{n}"), block(f"r{n}"), demand(f"r{n}", num_pages=4), stale
            )
            for n in range(9)
        )
    )
    assert sum(isinstance(each, Reservation) for each in got) == 2
    assert load_of(await routers[0].snapshot()).free_pages == 2
    reasons = {each.reason for each in got if isinstance(each, Refused)}
    assert reasons == {RefusalReason.NO_PAGES}


async def test_an_overflow_is_refused_when_the_load_has_reached_theta_meanwhile(
    world: World,
) -> None:
    await world.publish(lease("w"))
    router = world.router()
    stale = load_of(await router.snapshot())
    await reserved(router, "r1", cost_tokens=100)
    got = await router.reserve_prefill(
        ticket("r2"), block("r2"), demand("r2"), stale, bound_tokens=100.0
    )
    assert got == Refused(RefusalReason.OVER_THETA)
    under = await router.reserve_prefill(
        ticket("r2"), block("r2"), demand("r2"), stale, bound_tokens=100.5
    )
    assert isinstance(under, Reservation)


async def test_a_prefill_leaves_room_for_pending_decodes_where_they_could_go(
    world: World,
) -> None:
    await world.publish(lease("c", total_pages=10), lease("p", role=Role.PREFILL, total_pages=10))
    router = world.router()
    await router.join_decode_line(ticket("old", 0.5), num_pages=7)
    snapshot = await router.snapshot()
    assert snapshot.fleet.pending_decode_pages == 7
    assert snapshot.num_pending_decodes == 1

    refused = await reserve(router, worker_id="c", num_pages=4)
    assert refused == Refused(RefusalReason.NO_PAGES)
    assert isinstance(await reserve(router, "r2", worker_id="c", num_pages=3), Reservation)
    assert isinstance(await reserve(router, "r3", worker_id="p", num_pages=10), Reservation)


async def test_a_burst_that_shares_a_snapshot_spreads_over_the_workers(world: World) -> None:
    await world.publish(*(lease(f"w{n}") for n in range(4)))
    router = world.router()

    async def place(number: int) -> str:
        snapshot = await router.snapshot()
        worker = min(snapshot.fleet.workers, key=lambda w: w.outstanding_prefill_tokens)
        name = f"r{number}"
        got = await router.reserve_prefill(ticket(name), block(name), demand(name), worker)
        assert isinstance(got, Reservation)
        return got.worker_id

    placed = await asyncio.gather(*(place(number) for number in range(12)))
    assert {name: placed.count(name) for name in placed} == {f"w{n}": 3 for n in range(4)}


async def test_workers_that_cannot_be_used_are_shown_with_what_differs(world: World) -> None:
    await world.publish(
        lease("w"),
        lease("other", model="big"),
        lease("new", protocol=99),
        lease("blocks", block_length=16),
        lease("pages", page_tokens=32, block_length=16),
        lease("torn"),
    )
    await world.redis.hdel(world.keys.worker("torn"), "url", "total_pages")
    await world.redis.hset(world.keys.worker("torn"), "role", "chef")
    snapshot = await world.router().snapshot()
    assert set(snapshot.leases) == {"w"}
    assert [worker.worker_id for worker in snapshot.fleet.workers] == ["w"]
    assert {
        misfit.worker_id: [each.field for each in misfit.differences]
        for misfit in snapshot.incompatible
    } == {
        "other": ["model"],
        "new": ["protocol"],
        "blocks": ["block_length"],
        "pages": ["block_length", "page_tokens"],
        "torn": ["role", "total_pages", "url"],
    }
    (torn,) = (each for each in snapshot.incompatible if each.worker_id == "torn")
    assert torn.reason.startswith("role chef, here unreadable (another version), total_pages missi")


async def test_a_snapshot_follows_draining_and_a_new_epoch(world: World) -> None:
    await world.publish(lease("w"))
    router = world.router()
    assert not load_of(await router.snapshot()).is_draining
    await world.publish(lease("w", is_draining=True))
    assert load_of(await router.snapshot()).is_draining
    await world.publish(lease("w", epoch="w-2", role=Role.DECODE, total_pages=7))
    changed = load_of(await router.snapshot())
    assert (changed.epoch, changed.role, changed.total_pages) == ("w-2", Role.DECODE, 7)
    assert not changed.is_draining


async def test_a_torn_lease_is_left_out(world: World) -> None:
    await world.publish(lease("w"), lease("torn"))
    await world.redis.hdel(world.keys.worker("torn"), "total_pages")
    snapshot = await world.router().snapshot()
    assert set(snapshot.leases) == {"w"}


@pytest.mark.parametrize("request_id", ["", "two\x1fparts", "line\nbreak"])
def test_a_ticket_refuses_an_id_that_would_break_a_record(request_id: str) -> None:
    with pytest.raises(ValueError, match="request_id"):
        ticket(request_id)


async def reserve_on(
    router: Ledger, line: Line, worker: WorkerLoad, cost_tokens: int
) -> Reservation | Refused:
    block_demand = demand("long", 4, cost_tokens=cost_tokens)
    if line is Line.DECODE:
        return await router.reserve_decode(ticket("long"), block("long"), block_demand, worker)
    return await router.reserve_prefill(ticket("long"), block("long"), block_demand, worker)


@pytest.mark.parametrize("line", list(Line))
async def test_a_worker_gets_no_block_that_is_too_long_for_it(world: World, line: Line) -> None:
    await world.publish(lease("w", max_sequence_tokens=1000))
    router = world.router()
    worker = load_of(await router.snapshot())
    assert worker.max_sequence_tokens == 1000
    # Whatever the router believed: the lease in Redis decides.
    mistaken = replace(worker, max_sequence_tokens=math.inf)
    refused = await reserve_on(router, line, mistaken, 1001)
    assert refused == Refused(RefusalReason.TOO_LONG)
    assert await world.is_empty()
    taken = await reserve_on(router, line, mistaken, 1000)
    assert isinstance(taken, Reservation)
    await router.release(taken)
    assert await world.is_empty()


@pytest.mark.parametrize("line", list(Line))
async def test_a_lease_that_says_no_longest_sequence_bounds_none(world: World, line: Line) -> None:
    await world.publish(lease("w"))
    router = world.router()
    worker = load_of(await router.snapshot())
    await world.redis.hdel(world.keys.worker("w"), "max_sequence_tokens")
    taken = await reserve_on(router, line, worker, 10**6)
    assert isinstance(taken, Reservation)
