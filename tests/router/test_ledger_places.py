"""The driver over the real ledger: places in Redis, stub workers over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.router.builders import MODEL, router_settings
from tests.router.leases import Fleet, until
from tests.router.stub_worker import ConnectionBreaks, FirstBlockHeld, StubWorker, say
from tests.router.test_api_answers import TEXT, messages
from tests.router.test_driver import prefill_and_decode
from tests.router.test_driver_failures import fails_once

from sangam_core.placement import Role
from sangam_core.wire import BlockStart
from sangam_router.internal_api import internal_app
from sangam_router.public_api.app import public_app
from sangam_router.router import Model, Parts, running


@asynccontextmanager
async def router(
    leased: Fleet, model_folder: Path, **changes: Any
) -> AsyncIterator[tuple[Parts, httpx.AsyncClient]]:
    """A whole router without its sockets, and a client of its public port."""
    seconds = {"router_lease_seconds": 1.0, "fleet_refresh_seconds": 0.05, "poll_seconds": 0.05}
    settings = router_settings(
        redis_url=leased.url, redis_namespace=leased.namespace, **(seconds | changes)
    )
    model = Model.read(settings.model_copy(update={"model": str(model_folder)}))
    async with running(settings, model) as parts:
        transport = httpx.ASGITransport(app=public_app(parts.public))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://r", timeout=60
        ) as client:
            yield parts, client


@asynccontextmanager
async def workers(leased: Fleet, *stubs: StubWorker) -> AsyncIterator[None]:
    """Started workers that know each other and hold leases."""
    async with AsyncExitStack() as stack:
        for stub in stubs:
            await stack.enter_async_context(stub)
            stub.peers.update({other.worker_id: other for other in stubs})
        await leased.publish(*stubs)
        yield
        for stub in stubs:
            await stub.until_idle()


async def waits(leased: Fleet) -> bool:
    """Whether somebody stands in line."""
    return "lines" in await leased.counters()


def chat(**wishes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages(), **wishes}


async def ask(client: httpx.AsyncClient, **wishes: Any) -> str:
    response = await client.post("/v1/chat/completions", json=chat(**wishes))
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


@dataclass
class Begun:
    """An answer of whose first block a worker, the only one, runs no pass before ``go_on``."""

    worker: StubWorker
    client: httpx.AsyncClient
    answer: "asyncio.Task[str]"
    go_on: asyncio.Event


@asynccontextmanager
async def begun(leased: Fleet, model_folder: Path, **changes: Any) -> AsyncIterator[Begun]:
    """A router with one worker, and an answer that has begun there."""
    held = FirstBlockHeld()
    async with StubWorker(answer=say(TEXT), before_pass=held) as worker:
        await leased.publish(worker)
        async with router(leased, model_folder, **changes) as (_, client):
            answer = asyncio.create_task(ask(client))
            await asyncio.wait_for(held.reached.wait(), 10)
            yield Begun(worker, client, answer, held.go_on)


async def test_answers_come_and_redis_is_empty_afterwards(
    leased: Fleet, model_folder: Path
) -> None:
    one, two = (StubWorker(name, epoch=f"{name}e", answer=say(TEXT)) for name in "ab")
    async with workers(leased, one, two), router(leased, model_folder) as (_, client):
        texts = await asyncio.gather(*(ask(client) for _ in range(20)))
        await until(leased.is_empty)
    assert texts == [TEXT] * 20
    assert one.starts
    assert two.starts


async def test_disaggregated_answers_come_and_redis_is_empty_afterwards(
    leased: Fleet, model_folder: Path
) -> None:
    prefill, decode = prefill_and_decode(TEXT)
    async with workers(leased, prefill, decode), router(leased, model_folder) as (_, client):
        texts = await asyncio.gather(*(ask(client) for _ in range(20)))
        await until(leased.is_empty)
    assert texts == [TEXT] * 20
    assert len(decode.starts) == len(prefill.starts) == 60


async def test_blocks_are_handed_over_only_where_their_kv_is_taken(
    leased: Fleet, model_folder: Path
) -> None:
    prefill, decode = prefill_and_decode(TEXT)
    other = StubWorker("other", epoch="oe", role=Role.DECODE)
    async with workers(leased, prefill, decode), workers(leased, other):
        await leased.publish(prefill, decode, kv_format="float32 by gloo")
        await leased.publish(other, kv_format="bfloat16 by gloo", total_pages=1000)
        async with router(leased, model_folder) as (parts, client):
            assert await asyncio.gather(*(ask(client) for _ in range(5))) == [TEXT] * 5
            await parts.report.refresh()
            body = parts.report.body()
    assert {each["kv_format"] for each in body["workers"]} == {
        "float32 by gloo",
        "bfloat16 by gloo",
    }
    assert "between workers of the same KV" in body["remark"]
    assert len(decode.starts) == 15
    assert not other.starts


async def test_a_lost_block_is_made_good(leased: Fleet, model_folder: Path) -> None:
    hook = fails_once(2, ConnectionBreaks, block=1)
    stubs = [
        StubWorker(name, epoch=f"{name}e", answer=say(TEXT), before_pass=hook) for name in "ab"
    ]
    async with workers(leased, *stubs), router(leased, model_folder) as (_, client):
        assert await ask(client) == TEXT
        await until(leased.is_empty)


async def test_a_worker_whose_lease_expires_loses_its_blocks(
    leased: Fleet, model_folder: Path
) -> None:
    reached = asyncio.Event()

    async def hang(start: BlockStart, step: int) -> None:
        reached.set()
        await asyncio.Event().wait()

    silent = StubWorker("a", epoch="ae", before_pass=hang)
    async with workers(leased, silent), router(leased, model_folder) as (_, client):
        asking = asyncio.create_task(ask(client))
        await asyncio.wait_for(reached.wait(), 10)
        async with StubWorker("b", epoch="be", answer=say(TEXT)) as other:
            await leased.publish(other)
            await leased.lose(silent)
            assert await asyncio.wait_for(asking, 10) == TEXT
        await until(leased.is_empty)


async def test_requests_wait_for_a_worker_and_are_told_when_none_comes(
    leased: Fleet, model_folder: Path
) -> None:
    async with router(leased, model_folder, no_worker_seconds=0.3) as (_, client):
        response = await client.post("/v1/chat/completions", json=chat())
        assert response.status_code == 503
        assert "retry-after" in response.headers
    async with router(leased, model_folder, no_worker_seconds=10) as (_, client):
        asking = asyncio.create_task(ask(client))
        await until(lambda: waits(leased))
        async with StubWorker(answer=say(TEXT)) as late:
            await leased.publish(late)
            assert await asyncio.wait_for(asking, 10) == TEXT


async def test_while_leases_return_to_an_emptied_redis_long_requests_wait(
    leased: Fleet, model_folder: Path
) -> None:
    """The worker that is back takes neither of them; the one that is not took both before."""
    short, long = StubWorker("s", epoch="se", role=Role.DECODE), StubWorker("l", answer=say(TEXT))
    async with (
        workers(leased, short),
        workers(leased, long),
        router(leased, model_folder) as (parts, client),
    ):
        await leased.publish(short, total_pages=6)
        assert await ask(client) == TEXT
        await leased.empty()
        await leased.publish(short, total_pages=6)
        await parts.report.refresh()
        asking = [
            asyncio.create_task(ask(client, max_tokens=96)),
            asyncio.create_task(ask(client, cache="none", max_tokens=96)),
        ]
        await until(lambda: waits(leased))
        assert not any(each.done() for each in asking)
        await leased.publish(long)
        assert await asyncio.wait_for(asyncio.gather(*asking), 10) == [TEXT, TEXT]


async def test_a_full_line_turns_requests_away(leased: Fleet, model_folder: Path) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def hold(start: BlockStart, step: int) -> None:
        started.set()
        await go_on.wait()

    async with StubWorker(answer=say("hi"), before_pass=hold) as worker:
        await leased.publish(worker, total_pages=10)
        async with router(leased, model_folder, max_waiting=1) as (_, client):
            running_ = asyncio.create_task(ask(client, max_tokens=64))
            await asyncio.wait_for(started.wait(), 10)
            waiting = asyncio.create_task(ask(client, max_tokens=64))
            await until(lambda: waits(leased))
            response = await client.post("/v1/chat/completions", json=chat(max_tokens=64))
            go_on.set()
            assert await running_ == await waiting == "hi"
    assert response.status_code == 429


async def test_a_bound_on_the_fleet_holds_up_new_requests_only(
    leased: Fleet, model_folder: Path
) -> None:
    async with begun(leased, model_folder, max_blocks_per_decoder=0.01) as first:
        second = asyncio.create_task(ask(first.client))
        await until(lambda: waits(leased))
        assert len({start.key.request_id for start in first.worker.starts}) == 1
        first.go_on.set()
        assert await first.answer == await second == TEXT
        await until(leased.is_empty)
    assert len(first.worker.starts) == 6


async def test_what_no_pool_holds_is_refused_at_once(leased: Fleet, model_folder: Path) -> None:
    async with StubWorker() as worker:
        await leased.publish(worker, total_pages=6)
        async with router(leased, model_folder) as (parts, client):
            await parts.report.refresh()
            response = await client.post("/v1/chat/completions", json=chat(max_tokens=64))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_the_internal_port_shows_the_fleet(leased: Fleet, model_folder: Path) -> None:
    prefill, decode = prefill_and_decode(TEXT)
    async with workers(leased, prefill, decode), router(leased, model_folder) as (parts, client):
        await leased.redis.hset(
            leased.keys.desired("p"), mapping={"role": "decode", "is_drained": "1"}
        )
        assert await ask(client) == TEXT
        app = internal_app(parts.public.metrics, parts.report, parts.readiness, parts.audit)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://r") as inside:
            fleet = (await inside.get("/admin/fleet")).json()
            metrics = (await inside.get("/metrics")).text
            ready = await inside.get("/readyz")
            page = await inside.get("/")
            parts.readiness.is_shutting_down = True
            leaving = await inside.get("/readyz")
    by_id = {worker["worker_id"]: worker for worker in fleet["workers"]}
    assert fleet["is_ready"]
    assert (by_id["p"]["role"], by_id["p"]["desired_role"]) == ("prefill", "decode")
    assert by_id["p"]["is_drain_desired"]
    assert (by_id["p"]["name"], by_id["p"]["refused"]) == ("p", None)
    assert (by_id["p"]["quantization"], fleet["remark"]) == ("none", None)
    assert by_id["d"]["free_pages"] == 100
    assert by_id["d"]["carried_tokens"] == 7
    for line in (
        'sangam_requests_total{outcome="stop"} 1.0',
        'sangam_block_dispatches_total{role="prefill",stage="prefill"} 3.0',
        'sangam_block_dispatches_total{role="decode",stage="decode"} 3.0',
        "sangam_kv_transfer_seconds_count 3.0",
        'sangam_fleet_deficit_tokens{role="decode",worker="d",worker_id="d"} 7.0',
        'sangam_fleet_outstanding_prefill_tokens{role="prefill",worker="p",worker_id="p"} 0.0',
        'sangam_fleet_free_pages{role="decode",worker="d",worker_id="d"} 100.0',
        'sangam_waiting_line{line="prefill"} 0.0',
        "sangam_requests_in_flight 0.0",
    ):
        assert line in metrics, line
    assert ready.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert leaving.status_code == 503
    assert leaving.json()["problem"] == "shutting down"


async def test_workers_of_another_block_length_get_nothing_and_are_shown(
    leased: Fleet, model_folder: Path
) -> None:
    one, other = StubWorker("a", epoch="ae", answer=say(TEXT)), StubWorker("b", epoch="be")
    async with (
        workers(leased, one),
        workers(leased, other),
        router(leased, model_folder, no_worker_seconds=0.3) as (parts, client),
    ):
        await leased.publish(other, block_length=16)
        await leased.redis.hset(leased.keys.refused("b"), mapping={"reason": "unknown_role"})
        assert await ask(client) == TEXT
        app = internal_app(parts.public.metrics, parts.report, parts.readiness, parts.audit)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://r") as inside:
            fleet = (await inside.get("/admin/fleet")).json()
            await leased.lose(one)
            refused = await client.post("/v1/chat/completions", json=chat())
            ready = await inside.get("/readyz")
    (shown,) = fleet["incompatible_workers"]
    assert (shown["worker_id"], shown["url"]) == ("b", other.url)
    assert shown["differences"] == [{"field": "block_length", "theirs": "16", "ours": "32"}]
    assert shown["reason"] == "block_length 16, here 32 (SANGAM_BLOCK_LENGTH)"
    assert shown["refused"]["reason"] == "unknown_role"
    problem = "no worker is ready (1 cannot be used: block_length 16, here 32"
    assert refused.status_code == 503
    assert problem in refused.json()["error"]["message"]
    assert ready.status_code == 200, "every router sees the same fleet"
    assert problem in ready.json()["fleet_problem"]
    assert not other.starts


@pytest.mark.parametrize("role", list(Role))
async def test_the_fleet_counts_as_ready_when_it_can_prefill_and_decode(
    leased: Fleet, model_folder: Path, role: Role
) -> None:
    async with workers(leased, StubWorker(role=role)), router(leased, model_folder) as (parts, _):
        await parts.report.refresh()
        assert parts.report.body()["is_ready"] is (role is Role.COLOCATED)
        assert parts.readiness.problem() is None, "the router says so itself"
