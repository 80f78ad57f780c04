"""The worker's lease against a real Redis: how it is kept, announced, lost and taken away."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from structlog.testing import capture_logs
from tests.worker.fakes import ToyEngine
from tests.worker.harness import a_client, a_start, a_worker, eventually
from tests.worker.ledger_watch import QUICK, Watch, a_watch

from sangam_core.errors import ConfigurationError
from sangam_core.lease import DesiredState
from sangam_core.placement import Role
from sangam_router.local.redis_server import RedisServer, running_redis
from sangam_worker.presence import connect
from sangam_worker.process import Worker

pytestmark = pytest.mark.integration


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


@pytest.fixture
async def watch(server: RedisServer) -> AsyncIterator[Watch]:
    async with a_watch(server) as watching:
        yield watching


def heartbeats(worker: Worker, outcome: str = "renewed") -> float:
    name, labels = "sangam_worker_heartbeats_total", {"outcome": outcome}
    return worker.metrics.registry.get_sample_value(name, labels) or 0


def failed_heartbeats(worker: Worker) -> float:
    return heartbeats(worker, "failed")


def becomes_ready(worker: Worker) -> "asyncio.Future[None]":
    return asyncio.ensure_future(eventually(lambda: worker.presence.trouble is None))


async def test_a_worker_registers_says_so_and_is_ready(server: RedisServer, watch: Watch) -> None:
    settings = {
        "worker_id": "w",
        "role": Role.PREFILL,
        "tau_tokens_prefill": 77,
        "quantization": "fp8",
    }
    async with a_worker(redis_url=server.url, **settings) as worker, a_client() as client:
        assert await watch.woken() == "w"
        lease = await watch.lease("w")
        assert lease is not None
        assert lease.url == worker.url
        assert (lease.role, lease.boot_role) == (Role.PREFILL, Role.PREFILL)
        assert lease.epoch == worker.standing.epoch
        assert (lease.free_pages, lease.total_pages, lease.page_tokens) == (64, 64, 16)
        assert (lease.model, lease.quantization) == ("small", "fp8")
        assert (lease.block_length, lease.tau_tokens) == (32, 77)
        assert not lease.is_draining
        assert await watch.redis.smembers(watch.keys.workers) == {"w"}
        assert 0 < await watch.redis.pttl(watch.keys.worker("w")) <= 5000
        assert await client.get(worker, "/readyz") == (
            200,
            {"worker_id": "w", "status": "ready", "reasons": [], "remarks": []},
        )


async def test_the_lease_follows_the_pages_that_are_taken(
    server: RedisServer, watch: Watch
) -> None:
    settings = {"redis_url": server.url, "worker_id": "w", "role": Role.PREFILL, **QUICK}
    async with a_worker(**settings) as worker, a_client() as client:
        run = await client.start(worker, a_start(worker, hands_over=True))

        async def shows_the_block() -> bool:
            lease = await watch.lease("w")
            return lease is not None and lease.free_pages == 60

        await eventually(shows_the_block)
        run.response.close()


async def test_fields_of_another_version_do_not_linger(server: RedisServer, watch: Watch) -> None:
    await watch.redis.hset(watch.keys.worker("w"), "from_the_future", "1")
    async with a_worker(redis_url=server.url, worker_id="w") as worker:
        await becomes_ready(worker)
        assert "from_the_future" not in await watch.redis.hgetall(watch.keys.worker("w"))


async def test_a_fault_while_renewing_is_told_and_the_heartbeat_goes_on(
    server: RedisServer,
) -> None:
    async with a_worker(redis_url=server.url, worker_id="w", **QUICK) as worker:
        await becomes_ready(worker)
        on_desired, seen = worker.presence._on_desired, []

        def fails(desired: DesiredState) -> None:
            seen.append(desired)
            raise ValueError("not thought of")

        with capture_logs() as logs:
            worker.presence._on_desired = fails
            await eventually(lambda: len(seen) >= 3)
        told = [each for each in logs if each["event"] == "a fault while the lease is renewed"]
        assert len(told) == 1, "once, not with every heartbeat"
        assert failed_heartbeats(worker) >= 2
        worker.presence._on_desired = on_desired
        await becomes_ready(worker)


async def test_only_changes_are_announced(server: RedisServer, watch: Watch) -> None:
    async with a_worker(redis_url=server.url, worker_id="w", **QUICK) as worker:
        assert await watch.woken() == "w"
        await eventually(lambda: heartbeats(worker) >= 5)
        worker.control.drain()
        assert await watch.woken() == "w"
        lease = await watch.lease("w")
        assert lease is not None
        assert lease.is_draining
        worker.control.undrain()
        assert await watch.woken() == "w"


async def test_a_redis_that_is_away_stops_no_block_and_the_lease_returns(
    server: RedisServer,
) -> None:
    with capture_logs() as logs:
        async with (
            a_worker(redis_url=server.url, worker_id="w", **QUICK) as worker,
            a_client() as client,
        ):
            await becomes_ready(worker)
            server.kill()
            await eventually(lambda: worker.presence.trouble is not None)
            status, body = await client.get(worker, "/readyz")
            assert status == 503
            assert "ConnectionError" in body["reasons"][0]
            assert (await client.get(worker, "/healthz"))[0] == 200
            run = await client.start(worker, a_start(worker))
            assert (await run.rest())[-1] == "completed"
            server.start()
            async with a_watch(server) as watch:
                assert await watch.lease_once_held("w")
            await becomes_ready(worker)
    told = [entry["event"] for entry in logs if "lease" in entry["event"]]
    assert told == ["lease held", "lease not renewed; serving goes on", "lease held"]


async def test_a_redis_that_is_away_from_the_beginning_is_told_of_once(
    server: RedisServer,
) -> None:
    server.kill()
    with capture_logs() as logs:
        async with a_worker(redis_url=server.url, worker_id="w", **QUICK) as worker:
            await eventually(lambda: failed_heartbeats(worker) >= 3)
            server.start()
            await becomes_ready(worker)
    told = [entry for entry in logs if "lease" in entry["event"]]
    assert [entry["log_level"] for entry in told] == ["warning", "info"]
    assert told[0]["event"].startswith("no lease yet: Redis cannot be used")
    assert "ConnectionError" in told[0]["error"]
    assert told[1]["event"] == "lease held"


async def test_a_lease_that_lapsed_is_announced_when_it_returns(
    server: RedisServer, watch: Watch
) -> None:
    async with a_worker(redis_url=server.url, worker_id="w", **QUICK) as worker:
        assert await watch.woken() == "w"
        await watch.redis.flushall()
        assert await watch.woken() == "w"
        assert await watch.lease("w") is not None
        await becomes_ready(worker)


async def test_leaving_takes_the_lease_away_and_says_so(server: RedisServer, watch: Watch) -> None:
    worker_id = "w"
    async with a_worker(redis_url=server.url, worker_id=worker_id) as worker:
        assert await watch.woken() == worker_id
        await worker.control.leave()
        await worker.presence.withdraw()
        assert await watch.woken() == worker_id  # drains
        assert await watch.lease(worker_id) is None
        assert await watch.redis.smembers(watch.keys.workers) == set()


async def test_leaving_leaves_the_lease_of_a_successor_alone(
    server: RedisServer, watch: Watch
) -> None:
    async with a_worker(redis_url=server.url, worker_id="w") as worker:
        await watch.lease_once_held("w")
        await worker.control.leave()
        await watch.redis.hset(watch.keys.worker("w"), "epoch", "of-the-successor")
        await worker.presence.withdraw()
        assert await watch.redis.hget(watch.keys.worker("w"), "epoch") == "of-the-successor"
        assert await watch.redis.smembers(watch.keys.workers) == {"w"}


async def test_a_worker_whose_engine_is_broken_lets_its_lease_lapse(
    server: RedisServer, watch: Watch
) -> None:
    engine = ToyEngine(failures=[RuntimeError("broken")])
    settings = {"redis_url": server.url, "worker_id": "w", "max_engine_failures": 1, **QUICK}
    async with a_worker(engine, **settings) as worker, a_client() as client:
        await watch.lease_once_held("w")
        run = await client.start(worker, a_start(worker))
        assert (await run.rest())[-1] == "lost"

        async def has_lapsed() -> bool:
            return await watch.lease("w") is None

        await eventually(has_lapsed)


async def test_a_worker_that_is_stopped_renews_no_more(server: RedisServer, watch: Watch) -> None:
    async with a_worker(redis_url=server.url, worker_id="w", **QUICK) as worker:
        await watch.lease_once_held("w")
    renewed = heartbeats(worker)

    async def has_lapsed() -> bool:
        return await watch.lease("w") is None

    await eventually(has_lapsed)
    assert heartbeats(worker) == renewed


async def test_a_password_and_a_namespace_are_used() -> None:
    with running_redis(password="open sesame") as server:
        settings = {"redis_url": server.url, "redis_namespace": "other", "worker_id": "w"}
        async with a_worker(**settings), a_watch(server, "other") as watch:
            assert await watch.lease_once_held("w")


async def test_a_cluster_is_spoken_to_as_a_cluster() -> None:
    with running_redis(is_cluster_node=True) as server:
        settings = {"redis_url": server.url, "redis_cluster": True, "worker_id": "w"}
        async with a_watch(server) as watch, a_worker(**settings) as worker:
            assert await watch.woken() == "w"
            assert await watch.lease("w")
            await worker.presence.withdraw()
            assert await watch.lease("w") is None


async def test_a_url_that_is_none_stops_the_start() -> None:
    with pytest.raises(ConfigurationError, match="SANGAM_REDIS_URL"):
        connect("http://nowhere", is_cluster=False, timeout_seconds=1.0)
