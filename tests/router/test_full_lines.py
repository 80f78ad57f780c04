"""A full line over the real ledger: it turns new requests away, never an answer that has begun."""

import asyncio
from pathlib import Path

from tests.router.leases import Fleet, until
from tests.router.stub_worker import FirstBlockHeld, StubWorker, say
from tests.router.test_api_answers import TEXT
from tests.router.test_ledger_places import ask, chat, router


async def test_an_answer_that_has_begun_joins_a_line_that_is_full(
    leased: Fleet, model_folder: Path
) -> None:
    held = FirstBlockHeld()
    async with StubWorker(answer=say(TEXT), before_pass=held) as worker:
        await leased.publish(worker)
        async with router(leased, model_folder, max_waiting=1) as (_, client):
            begun = asyncio.create_task(ask(client))
            await asyncio.wait_for(held.reached.wait(), 10)
            await leased.publish(worker, is_draining=True)
            new = asyncio.create_task(ask(client))
            await until(lambda: num_in_line(leased, 1))
            held.go_on.set()
            await until(lambda: num_in_line(leased, 2))
            await leased.publish(worker)
            assert await asyncio.wait_for(asyncio.gather(begun, new), 15) == [TEXT, TEXT]
        await until(leased.is_empty)


async def num_in_line(leased: Fleet, count: int) -> bool:
    lines = (await leased.counters()).get("lines", [])
    return sum([await leased.redis.zcard(line) for line in lines]) == count


async def test_an_answer_that_has_begun_outwaits_new_ones_while_no_worker_takes_it(
    leased: Fleet, model_folder: Path
) -> None:
    held = FirstBlockHeld()
    async with StubWorker(answer=say(TEXT), before_pass=held) as worker:
        await leased.publish(worker)
        async with router(leased, model_folder, no_worker_seconds=0.3) as (_, client):
            begun = asyncio.create_task(ask(client))
            await asyncio.wait_for(held.reached.wait(), 10)
            await leased.publish(worker, is_draining=True)
            held.go_on.set()
            await until(lambda: num_in_line(leased, 1))
            new = await client.post("/v1/chat/completions", json=chat())
            assert new.status_code == 503
            await leased.publish(worker)
            assert await asyncio.wait_for(begun, 15) == TEXT
