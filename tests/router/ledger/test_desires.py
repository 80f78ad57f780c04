"""Wishes for workers' roles in Redis: the newest wins, and somebody always decodes."""

import itertools
from typing import Any

import pytest
from tests.router.ledger.world import World, lease

from sangam_core.placement import Role
from sangam_router.ledger.desires import Decision, Desires, Verdict, Wish

pytestmark = pytest.mark.integration

SETTLE_SECONDS = 5.0


def a_wish(worker_id: str = "w", version: int | str = 1, **changes: Any) -> Wish:
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "name": worker_id,
        "version": str(version),
        "boot_role": Role.COLOCATED,
        "role": "colocated",
        "is_drained": False,
    }
    return Wish(**values | changes)


async def desired(world: World, worker_id: str = "w") -> dict[str, str]:
    return dict(await world.redis.hgetall(world.keys.desired(worker_id)))


async def refused(world: World, worker_id: str = "w") -> dict[str, str]:
    return dict(await world.redis.hgetall(world.keys.refused(worker_id)))


def desires_of(world: World) -> Desires:
    return Desires(world.redis, world.keys, settle_seconds=SETTLE_SECONDS)


@pytest.fixture(autouse=True)
async def settled(world: World) -> None:
    """A router has been here for long."""
    await world.router().heartbeat()
    await world.age(SETTLE_SECONDS + 2)


async def test_a_wish_is_written_and_expires(world: World) -> None:
    desires = desires_of(world)
    assert await desires.write(a_wish(version=5, role="decode")) == Decision(Verdict.APPLIED)
    assert await desired(world) == {"role": "decode", "is_drained": "0", "version": "5"}
    assert 3600_000 < await world.redis.pttl(world.keys.desired("w")) <= 24 * 3600_000


async def test_the_same_wish_again_is_kept_and_takes_the_newer_version(world: World) -> None:
    desires = desires_of(world)
    await desires.write(a_wish(version=5))
    assert await desires.write(a_wish(version=5)) == Decision(Verdict.KEPT)
    assert await desires.write(a_wish(version=6)) == Decision(Verdict.KEPT)
    assert (await desired(world))["version"] == "6"


@pytest.mark.parametrize(
    ("older", "newer"),
    [("9", "10"), ("99999999999999999998", "99999999999999999999"), ("5", "6")],
)
async def test_an_older_wish_changes_nothing(world: World, older: str, newer: str) -> None:
    desires = desires_of(world)
    await desires.write(a_wish(version=newer, role="decode"))
    stale = await desires.write(a_wish(version=older, role="colocated"))
    assert stale == Decision(Verdict.STALE)
    assert (await desired(world))["role"] == "decode"


async def test_an_older_wish_does_not_undo_a_newer_refusal(world: World) -> None:
    desires = desires_of(world)
    await desires.write(a_wish(version=5))
    await desires.write(a_wish(version=7, role="chef", objection="unknown_role"))
    assert await desires.write(a_wish(version=6)) == Decision(Verdict.STALE)
    assert (await refused(world))["role"] == "chef"


async def test_an_unknown_role_is_refused_and_the_last_wish_stands(world: World) -> None:
    desires = desires_of(world)
    await desires.write(a_wish(version=5, role="decode"))
    got = await desires.write(a_wish(version=6, role="chef", objection="unknown_role"))
    assert got == Decision(Verdict.REFUSED, "unknown_role")
    assert (await desired(world))["role"] == "decode"
    assert await refused(world) == {
        "role": "chef",
        "is_drained": "0",
        "version": "6",
        "reason": "unknown_role",
    }
    assert await desires.write(a_wish(version=7, role="decode")) == Decision(Verdict.KEPT)
    assert await refused(world) == {}


@pytest.mark.parametrize("change", [{"role": "prefill"}, {"is_drained": True}])
async def test_the_last_worker_that_decodes_stays(world: World, change: dict[str, Any]) -> None:
    await world.publish(lease("w"), lease("p", role=Role.PREFILL))
    desires = desires_of(world)
    got = await desires.write(a_wish(version=2, **change))
    assert got == Decision(Verdict.REFUSED, "last_decode_worker")
    assert await desired(world) == {}
    await world.publish(lease("d", role=Role.DECODE))
    assert await desires.write(a_wish(version=2, **change)) == Decision(Verdict.APPLIED)
    assert await refused(world) == {}


@pytest.mark.parametrize(
    "other",
    [
        lease("x", role=Role.PREFILL),
        lease("x", is_draining=True),
        lease("x", role=Role.PREFILL, is_draining=True),
    ],
)
async def test_others_count_only_while_they_decode(world: World, other: Any) -> None:
    await world.publish(lease("w"), other)
    got = await desires_of(world).write(a_wish(role="prefill"))
    assert got.reason == "last_decode_worker"


async def test_another_that_is_about_to_stop_decoding_does_not_count(world: World) -> None:
    await world.publish(lease("a"), lease("b"))
    desires = desires_of(world)
    assert (await desires.write(a_wish("a", 1, role="prefill"))).verdict is Verdict.APPLIED
    assert (await desires.write(a_wish("b", 2, role="prefill"))).verdict is Verdict.REFUSED


async def test_a_lost_worker_does_not_count(world: World) -> None:
    await world.publish(lease("a"), lease("b"))
    await world.lose("b")
    got = await desires_of(world).write(a_wish("a", role="prefill"))
    assert got.reason == "last_decode_worker"


async def test_a_prefill_worker_may_stay_one_where_nobody_decodes(world: World) -> None:
    await world.publish(lease("p", role=Role.PREFILL))
    wish = a_wish("p", role="prefill", boot_role=Role.PREFILL)
    assert (await desires_of(world).write(wish)).verdict is Verdict.APPLIED


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_routers_agree_in_whatever_order_they_see_events(
    world: World, order: tuple[int, ...]
) -> None:
    await world.publish(lease("a"), lease("b"))
    wishes = [
        a_wish("a", 11, role="prefill"),
        a_wish("a", 12, role="decode"),
        a_wish("b", 13, role="decode"),
    ]
    for index in order:
        await desires_of(world).write(wishes[index])
    for wish in wishes:  # the other router
        await desires_of(world).write(wish)
    assert (await desired(world, "a"))["role"] == "decode"
    assert (await desired(world, "b"))["role"] == "decode"
    assert await refused(world, "a") == await refused(world, "b") == {}


async def test_while_leases_return_to_an_emptied_redis_nobody_is_taken_for_the_last(
    world: World,
) -> None:
    """What a worker's pod asks for is written again at a resync, before the others are back."""
    await world.publish(lease("p"), lease("d", role=Role.DECODE))
    router, desires = world.router("a"), desires_of(world)
    wish = a_wish("p", role="prefill")
    assert (await desires.write(wish)).verdict is Verdict.APPLIED
    await world.empty()
    assert await desires.write(wish) == Decision(Verdict.UNSURE), "no router is back"
    await router.heartbeat()
    assert await desires.write(wish) == Decision(Verdict.UNSURE), "it booted as a decoder"
    assert await refused(world, "p") == {} == await desired(world, "p")
    await world.publish(lease("p", role=Role.PREFILL))
    assert await desires.write(wish) == Decision(Verdict.APPLIED), "a prefill worker stays one"
    drain = a_wish("c", role="colocated", is_drained=True)
    assert await desires.write(drain) == Decision(Verdict.UNSURE)
    assert await refused(world, "c") == {} == await desired(world, "c")
    await world.publish(lease("d", role=Role.DECODE))
    assert await desires.write(drain) == Decision(Verdict.APPLIED)


async def test_after_leases_had_time_to_return_the_last_worker_that_decodes_stays(
    world: World,
) -> None:
    await world.empty()
    await world.publish(lease("w"))
    await world.router("a").heartbeat()
    drain = a_wish(is_drained=True)
    assert (await desires_of(world).write(drain)).verdict is Verdict.UNSURE
    await world.age(SETTLE_SECONDS + 2)
    assert (await desires_of(world).write(drain)).reason == "last_decode_worker"
    await world.redis.delete(f"{world.keys.prefix}born")  # as routers of older versions leave it
    assert (await desires_of(world).write(drain)).reason == "last_decode_worker"
