"""Draining, switching roles and leaving, over the internal API and the ledger."""

import asyncio
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs
from tests.worker.fakes import ToyEngine, toy_answer
from tests.worker.harness import (
    BlockRun,
    Client,
    a_client,
    a_decode,
    a_sequence,
    a_start,
    a_worker,
    eventually,
)
from tests.worker.ledger_watch import QUICK, a_watch
from tests.worker.loopback import LoopbackHub

from sangam_core.decoding import Decoding
from sangam_core.placement import Role
from sangam_core.wire import Lost, PassRan
from sangam_router.local.redis_server import RedisServer, running_redis
from sangam_worker import drain as drain_module
from sangam_worker.process import Worker


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


def code(run: BlockRun) -> str:
    """Why the block was lost."""
    last = run.events[-1]
    assert isinstance(last, Lost), last
    return last.reason.code


async def order(client: Client, worker: Worker, role: Role) -> int:
    """Order a role; the answer's status."""
    body = f'{{"role": "{role.value}"}}'
    async with await client.post(worker, "/internal/v1/role", body) as response:
        return response.status


async def drain(client: Client, worker: Worker, verb: str = "drain") -> dict[str, object]:
    async with await client.post(worker, f"/internal/v1/{verb}") as response:
        assert response.status == 200
        report = await response.json()
        assert isinstance(report, dict)
        return report


async def running_and_queued(
    engine: ToyEngine, client: Client, worker: Worker
) -> tuple[BlockRun, BlockRun]:
    """One block in an iteration that the closed gate holds up, one that waits for its first."""
    engine.gate.clear()
    running = await client.start(worker, a_start(worker, "running"))
    await eventually(lambda: engine.num_iterations == 1)
    queued = await client.start(worker, a_start(worker, "queued"))
    return running, queued


# -- draining -----------------------------------------------------------------------------------


async def test_a_drained_worker_refuses_hands_back_what_waits_and_finishes_what_runs() -> None:
    engine = ToyEngine()
    async with a_worker(engine) as worker, a_client() as client:
        running, queued = await running_and_queued(engine, client, worker)
        report = await drain(client, worker)
        assert report["is_draining"] is True
        assert report["reasons"] == ["drained by an operator"]
        status, body = await client.refused(worker, a_start(worker, "late"))
        assert (status, body["code"]) == (409, "draining")
        _, body = await client.get(worker, "/readyz")
        assert "drained by an operator" in body["reasons"]
        engine.gate.set()
        assert await queued.rest() == ["queued", "lost"]
        assert code(queued) == "draining"
        assert (await running.rest())[-1] == "completed"
        await client.becomes_idle(worker)
        assert (await drain(client, worker, "undrain"))["is_draining"] is False
        again = await client.start(worker, a_start(worker, "again"))
        assert (await again.rest())[-1] == "completed"


async def test_a_block_without_cache_that_has_run_counts_as_running() -> None:
    engine = ToyEngine(commits_per_pass=4)
    async with a_worker(engine) as worker, a_client() as client:
        run = await client.start(worker, a_start(worker, decoding=Decoding(cache="none")))
        await run.until(PassRan)
        await drain(client, worker)
        assert (await run.rest())[-1] == "completed"


async def test_held_kv_may_still_be_fetched_from_a_drained_worker() -> None:
    hub, ids = LoopbackHub(), a_sequence()
    async with (
        a_worker(hub=hub, role=Role.PREFILL) as sender,
        a_worker(hub=hub, role=Role.DECODE) as receiver,
        a_client() as client,
    ):
        first = await client.start(sender, a_start(sender, hands_over=True))
        await first.until(PassRan)
        await drain(client, sender)
        second = await client.start(receiver, a_decode(receiver, sender, first.overlay(ids)))
        assert (await second.rest())[-1] == "completed"
        assert (await first.rest())[-1] == "kv_sent"


# -- switching ------------------------------------------------------------------------------------


async def test_a_role_switch_drains_and_takes_a_new_epoch_and_budget() -> None:
    engine = ToyEngine()
    settings = {"tau_tokens_prefill": 4321}
    async with a_worker(engine, **settings) as worker, a_client() as client:
        former = worker.standing.epoch
        running, queued = await running_and_queued(engine, client, worker)
        assert await order(client, worker, Role.PREFILL) == 202
        await eventually(lambda: worker.standing.is_draining)
        engine.gate.set()
        assert await queued.rest() == ["queued", "lost"]
        assert code(queued) == "role_changed"
        assert (await running.rest())[-1] == "completed"
        await eventually(lambda: worker.standing.role is Role.PREFILL)
        assert not worker.standing.is_draining
        assert worker.standing.epoch != former
        stale = a_start(worker, "stale", hands_over=True, worker_epoch=former)
        _, body = await client.refused(worker, stale)
        assert body["code"] == "wrong_epoch"
        _, body = await client.refused(worker, a_start(worker, "in place"))
        assert body["code"] == "wrong_role"
        run = await client.start(worker, a_start(worker, "new", hands_over=True))
        await run.until(PassRan)
        assert await client.metric(worker, "sangam_worker_tau_tokens") == 4321
        assert await client.metric(worker, 'sangam_worker_role{role="prefill"}') == 1
        assert await client.metric(worker, "sangam_worker_role_switches_total") == 1
        run.response.close()


async def test_the_role_in_force_is_no_switch() -> None:
    async with a_worker() as worker, a_client() as client:
        former = worker.standing.epoch
        assert await order(client, worker, Role.COLOCATED) == 202
        run = await client.start(worker, a_start(worker))
        assert (await run.rest())[-1] == "completed"
        assert worker.standing.epoch == former


async def test_a_role_that_does_not_exist_gets_400() -> None:
    async with a_worker() as worker, a_client() as client:
        response = await client.post(worker, "/internal/v1/role", '{"role": "chef"}')
        assert response.status == 400
        assert (await response.json())["param"] == "role"


async def test_a_body_that_is_not_utf_8_gets_an_error_of_the_api_s_form() -> None:
    async with a_worker() as worker, a_client() as client:
        response = await client.post(worker, "/internal/v1/role", b'{"role": "\xff"}')
        assert response.status == 400
        body = await response.json()
        assert body["code"] == "invalid_request"
        assert set(body) == {"code", "message"}


async def test_a_route_or_a_method_that_there_is_not_gets_an_error_of_the_api_s_form() -> None:
    async with a_worker() as worker, a_client() as client:
        status, body = await client.get(worker, "/internal/v1/nothing")
        assert (status, body["code"]) == (404, "not_found")
        status, body = await client.get(worker, "/internal/v1/role")
        assert (status, body["code"]) == (405, "method_not_allowed")


async def test_blocks_that_outlive_the_drain_s_deadline_are_lost_and_the_switch_goes_on() -> None:
    async with (
        a_worker(role=Role.PREFILL, drain_deadline_seconds=0.1) as worker,
        a_client() as client,
    ):
        held = await client.start(worker, a_start(worker, hands_over=True))
        await held.until(PassRan)
        assert await order(client, worker, Role.COLOCATED) == 202
        assert (await held.rest())[-1] == "lost"
        assert code(held) == "role_changed"
        await eventually(lambda: worker.standing.role is Role.COLOCATED)
        assert await client.is_idle(worker)


async def test_no_role_is_switched_under_a_pass_however_often_its_block_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drain_module, "_DROP_SECONDS", 0.05)
    engine = ToyEngine()
    engine.gate.clear()
    async with (
        a_worker(engine, role=Role.PREFILL, drain_deadline_seconds=0.05) as worker,
        a_client() as client,
    ):
        run = await client.start(worker, a_start(worker, hands_over=True))
        await eventually(lambda: engine.num_iterations == 1)
        assert await order(client, worker, Role.COLOCATED) == 202
        await asyncio.sleep(10 * 0.05)
        assert worker.standing.role is Role.PREFILL
        engine.gate.set()
        assert (await run.rest())[-1] == "lost"
        assert code(run) == "role_changed"
        await eventually(lambda: worker.standing.role is Role.COLOCATED)


async def test_the_last_of_several_orders_wins() -> None:
    async with a_worker(role=Role.PREFILL) as worker, a_client() as client:
        held = await client.start(worker, a_start(worker, hands_over=True))
        await held.until(PassRan)
        assert await order(client, worker, Role.DECODE) == 202
        assert await order(client, worker, Role.COLOCATED) == 202
        held.response.close()
        await eventually(lambda: worker.standing.role is Role.COLOCATED)
        assert await client.metric(worker, "sangam_worker_role_switches_total") == 1


async def test_after_a_switch_former_pairs_are_closed_and_new_ones_work() -> None:
    hub, ids = LoopbackHub(), a_sequence()
    async with (
        a_worker(hub=hub, role=Role.PREFILL, worker_id="one") as one,
        a_worker(hub=hub, role=Role.DECODE, worker_id="two") as two,
        a_client() as client,
    ):
        for sender, receiver in ((one, two), (two, one)):
            first = await client.start(sender, a_start(sender, hands_over=True))
            await first.until(PassRan)
            start = a_decode(receiver, sender, first.overlay(ids))
            second = await client.start(receiver, start)
            assert (await second.rest())[-1] == "completed"
            assert (await first.rest())[-1] == "kv_sent"
            assert first.tokens() + second.tokens() == toy_answer(ids, range(20, 36))
            assert await order(client, one, Role.DECODE) == 202
            assert await order(client, two, Role.PREFILL) == 202
            await eventually(
                lambda: (one.standing.role, two.standing.role) == (Role.DECODE, Role.PREFILL)
            )


# -- the ledger's wishes -----------------------------------------------------------------


@pytest.mark.integration
async def test_the_ledger_s_desired_role_is_taken_and_its_removal_keeps_the_role(
    server: RedisServer,
) -> None:
    settings = {"redis_url": server.url, "worker_id": "w", **QUICK}
    async with a_worker(**settings) as worker, a_client() as client, a_watch(server) as watch:
        await watch.redis.hset(watch.keys.desired("w"), "role", "decode")

        async def is_decode() -> bool:
            lease = await watch.lease("w")
            return lease is not None and (lease.role, lease.is_draining) == (Role.DECODE, False)

        await eventually(is_decode)
        lease = await watch.lease("w")
        assert lease is not None
        assert (lease.boot_role, lease.epoch) == (Role.COLOCATED, worker.standing.epoch)
        assert await order(client, worker, Role.PREFILL) == 409
        await watch.redis.delete(watch.keys.desired("w"))

        async def order_is_taken() -> bool:
            return await order(client, worker, Role.DECODE) == 202

        await eventually(order_is_taken)
        assert worker.standing.role is Role.DECODE
        assert await client.metric(worker, "sangam_worker_role_switches_total") == 1


@pytest.mark.integration
async def test_an_unknown_desired_role_is_refused_where_it_can_be_seen(server: RedisServer) -> None:
    settings = {"redis_url": server.url, "worker_id": "w", **QUICK}
    with capture_logs() as logs:
        async with a_worker(**settings) as worker, a_client() as client, a_watch(server) as watch:
            await watch.redis.hset(watch.keys.desired("w"), "role", "chef")

            async def is_remarked() -> bool:
                _, body = await client.get(worker, "/readyz")
                return any("chef" in remark for remark in body["remarks"])

            await eventually(is_remarked)
            assert worker.standing.role is Role.COLOCATED
            assert (await client.get(worker, "/readyz"))[0] == 200
            sample = "sangam_worker_unknown_desired_roles_total"
            assert await client.metric(worker, sample) == 1
    told = [entry for entry in logs if entry.get("role") == "chef"]
    assert [entry["log_level"] for entry in told] == ["warning"]


@pytest.mark.integration
async def test_a_desired_drain_closes_the_worker_until_it_is_taken_back(
    server: RedisServer,
) -> None:
    settings = {"redis_url": server.url, "worker_id": "w", **QUICK}
    async with a_worker(**settings) as worker, a_client() as client, a_watch(server) as watch:
        await watch.redis.hset(watch.keys.desired("w"), "is_drained", "1")
        await eventually(lambda: worker.standing.is_draining)
        status, body = await client.refused(worker, a_start(worker, "late"))
        assert (status, body["code"]) == (409, "draining")
        await watch.redis.delete(watch.keys.desired("w"))  # Redis lost it: keep what is
        lease = await watch.lease_once_held("w")
        assert lease.is_draining
        await drain(client, worker, "undrain")  # an operator's word does not lift the ledger's
        assert worker.standing.is_draining
        await watch.redis.hset(watch.keys.desired("w"), "is_drained", "0")
        await eventually(lambda: not worker.standing.is_draining)


# -- leaving --------------------------------------------------------------------------------------


async def test_leaving_lets_running_blocks_finish() -> None:
    engine = ToyEngine()
    async with a_worker(engine) as worker, a_client() as client:
        running, queued = await running_and_queued(engine, client, worker)
        leaving = asyncio.create_task(worker.control.leave())
        await eventually(lambda: worker.standing.is_draining)
        engine.gate.set()
        await leaving
        assert (await running.rest())[-1] == "completed"
        assert await queued.rest() == ["queued", "lost"]
        assert code(queued) == "draining"


async def test_the_hook_before_the_stop_and_the_stop_share_one_deadline() -> None:
    async with (
        a_worker(role=Role.PREFILL, drain_deadline_seconds=2.0) as worker,
        a_client() as client,
    ):
        held = await client.start(worker, a_start(worker, hands_over=True))
        await held.until(PassRan)
        clock = asyncio.get_running_loop().time
        began = clock()
        report = await drain(client, worker, "leave")
        assert report["num_blocks"] == 1
        await asyncio.sleep(1.5)  # the hook waits
        await worker.control.leave()
        assert clock() - began < 3.3  # two deadlines would be 3.5
        assert (await held.rest())[-1] == "lost"


async def test_leaving_is_bounded_by_the_drain_s_deadline() -> None:
    async with (
        a_worker(role=Role.PREFILL, drain_deadline_seconds=0.1) as worker,
        a_client() as client,
    ):
        held = await client.start(worker, a_start(worker, hands_over=True))
        await held.until(PassRan)
        await worker.control.leave()
        assert (await held.rest())[-1] == "lost"
        assert code(held) == "draining"
