"""Old and new routers and workers beside each other, as during a roll.

A router that counts no blocks stands for one of the version that knew no records of them: the
scripts with which it deletes records are that version's (``PREVIOUS_DELETION``).
"""

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

from sangam_core.wire import PROTOCOL_VERSION
from sangam_router.ledger import RefusalReason, Refused, Reservation
from sangam_router.ledger.scripts import Script, source

pytestmark = pytest.mark.integration

NEXT = PROTOCOL_VERSION + 1


async def test_each_router_uses_the_workers_that_speak_its_version(world: World) -> None:
    await world.publish(lease("old"), lease("new", protocol=NEXT))
    old, new = world.router("old"), world.router("new", protocol=NEXT)
    assert set((await old.snapshot()).leases) == {"old"}
    assert set((await new.snapshot()).leases) == {"new"}
    held = [
        (old, await reserved(old, "r1", worker_id="old")),
        (new, await reserved(new, "r2", worker_id="new")),
    ]
    assert [got.worker_id for _, got in held] == ["old", "new"]
    for router, got in held:
        await router.release(got)
    assert await world.is_empty()


async def test_requests_of_one_version_do_not_wait_for_older_ones_of_the_other(
    world: World,
) -> None:
    await world.publish(lease("new", protocol=NEXT))
    old, new = world.router("old"), world.router("new", protocol=NEXT)
    await old.join_line(ticket("stuck", 1.0))  # nobody is left that speaks the old version
    got = await reserve(new, "young", arrival_seconds=2.0, worker_id="new")
    assert isinstance(got, Reservation)


async def test_a_worker_that_returns_with_the_next_version_is_refused_to_the_old_router(
    world: World,
) -> None:
    await world.publish(lease("w"))
    old = world.router("old")
    as_seen = load_of(await old.snapshot())
    await world.publish(lease("w", protocol=NEXT))  # same epoch: only the version tells
    got = await old.reserve_prefill(ticket(), block(), demand(), as_seen)
    assert isinstance(got, Refused)
    assert got.reason is RefusalReason.INCOMPATIBLE


async def test_a_newer_worker_s_lease_with_fields_of_its_own_is_still_read(world: World) -> None:
    await world.publish(lease("w"))
    await world.redis.hset(world.keys.worker("w"), "temperature_celsius", "61")
    await reserved(world.router())


PREVIOUS_DELETION = """
local function delete_record(owner, field, value)
  if redis.call('HDEL', P .. 'records:' .. owner, field) == 0 then return false end
  local amount, place = string.match(value, '^(%d+)\\31([^\\31]*\\31[^\\31]*)\\31')
  add(string.match(field, ':(%a+)$'), place, -amount)
  return true
end
"""


def test_routers_without_records_of_blocks_delete_them_as_any_other() -> None:
    assert PREVIOUS_DELETION.strip() in source(Script.RENEW)


async def test_a_router_that_counts_no_blocks_reaps_those_of_one_that_does(world: World) -> None:
    await world.publish(lease("w"), lease("v"))
    old, new = world.router("old", counts_blocks=False), world.router("new")
    await reserved(new, "r1")
    await reserved(new, "r2", worker_id="v")
    await world.lose("v")
    await old.heartbeat()
    assert {record.worker_id for record in (await world.audit()).records} == {"w"}
    await world.expire(new)
    await old.heartbeat()
    assert await world.is_empty()


async def test_blocks_of_a_router_that_counts_none_are_missing_until_they_end(
    world: World,
) -> None:
    await world.publish(lease("w"))
    old, new = world.router("old", counts_blocks=False), world.router("new")
    held = await reserved(old, "r1")
    await reserved(new, "r2")
    assert load_of(await new.snapshot()).num_blocks == 1
    await old.release(held)
    assert load_of(await new.snapshot()).num_blocks == 1
    assert not (await world.audit()).differences
