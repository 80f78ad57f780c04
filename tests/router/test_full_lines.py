"""A full line over the real ledger: it turns new requests away, never an answer that has begun."""

import asyncio
from pathlib import Path

from tests.router.leases import Fleet, until
from tests.router.test_api_answers import TEXT
from tests.router.test_ledger_places import ask, begun, chat


async def test_an_answer_that_has_begun_joins_a_line_that_is_full(
    leased: Fleet, model_folder: Path
) -> None:
    async with begun(leased, model_folder, max_waiting=1) as old:
        await leased.publish(old.worker, is_draining=True)
        new = asyncio.create_task(ask(old.client))
        await until(lambda: num_in_line(leased, 1))
        old.go_on.set()
        await until(lambda: num_in_line(leased, 2))
        await leased.publish(old.worker)
        assert await asyncio.wait_for(asyncio.gather(old.answer, new), 15) == [TEXT, TEXT]
        await until(leased.is_empty)


async def num_in_line(leased: Fleet, count: int) -> bool:
    lines = (await leased.counters()).get("lines", [])
    return sum([await leased.redis.zcard(line) for line in lines]) == count


async def test_an_answer_that_has_begun_outwaits_new_ones_while_no_worker_takes_it(
    leased: Fleet, model_folder: Path
) -> None:
    async with begun(leased, model_folder, no_worker_seconds=0.3) as old:
        await leased.publish(old.worker, is_draining=True)
        old.go_on.set()
        await until(lambda: num_in_line(leased, 1))
        new = await old.client.post("/v1/chat/completions", json=chat())
        assert new.status_code == 503
        await leased.publish(old.worker)
        assert await asyncio.wait_for(old.answer, 15) == TEXT
