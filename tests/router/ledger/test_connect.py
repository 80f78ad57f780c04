"""Every kind of server and connection that must work, with one whole block on each."""

import asyncio
import shutil
from pathlib import Path

import pytest
from pydantic import SecretStr
from tests.router.ledger.tls_front import make_certificate, tls_front
from tests.router.ledger.world import World, block, demand, lease, load_of, placer, ticket, until

from sangam_core.errors import ConfigurationError, Unavailable
from sangam_core.placement import Role
from sangam_router.ledger.connect import connect
from sangam_router.ledger.scripts import Client
from sangam_router.local.redis_server import (
    BINARY_VARIABLE,
    RedisServer,
    find_redis_server,
    packaged_servers,
    running_redis,
)

pytestmark = pytest.mark.integration

SERVERS = sorted({find_redis_server(), *packaged_servers()})


async def serve_a_block(redis: Client) -> None:
    """Two routers, one waiting for the other; every script runs, every sum ends at 0."""
    world = World(redis, "connection")
    try:
        await world.publish(
            lease("p", role=Role.PREFILL, total_pages=4), lease("d", role=Role.DECODE)
        )
        a, b = world.router("a", poll_seconds=600.0), world.router("b", poll_seconds=600.0)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(router.run()) for router in (a, b)]
            first = await placer(a).prefill(ticket("r1", 1.0), block("r1"), demand("r1"))
            waiting = group.create_task(
                placer(b).prefill(ticket("r2", 2.0), block("r2"), demand("r2"))
            )

            async def is_waiting() -> bool:
                return (await a.snapshot()).num_waiting == 1

            await until(is_waiting, "r2 waits")
            await a.release_load(first.reservation)
            decode = await placer(a).decode(ticket("r1", 1.0), block("r1"), demand("r1"))
            await a.release(first.reservation)
            second = await asyncio.wait_for(waiting, 10.0)
            await world.expire(a)
            await a.heartbeat()
            assert not (await world.audit()).differences
            await a.release(decode.reservation)
            await b.release(second.reservation)
            for task in running:
                task.cancel()
        assert await world.is_empty()
    finally:
        await world.aclose()
        await redis.aclose()


@pytest.mark.parametrize("binary", SERVERS, ids=lambda path: path.name)
async def test_a_single_server_with_a_password(binary: Path) -> None:
    with running_redis(binary=binary, password="a b/c@d") as server:
        url = f"redis://:a%20b%2Fc%40d@127.0.0.1:{server.port}/0"
        await serve_a_block(connect(url, timeout_seconds=2.0))


@pytest.mark.parametrize("binary", SERVERS, ids=lambda path: path.name)
async def test_a_cluster_node(binary: Path) -> None:
    with running_redis(binary=binary, is_cluster_node=True) as server:
        await serve_a_block(connect(server.url, cluster=True, timeout_seconds=2.0))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
async def test_tls_with_an_own_authority(redis_server: RedisServer, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with tls_front(redis_server.port, certificate, key) as port:
        await serve_a_block(
            connect(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}", timeout_seconds=2.0)
        )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
async def test_a_certificate_of_an_unknown_authority_is_refused(
    redis_server: RedisServer, world: World, tmp_path: Path
) -> None:
    certificate, key = make_certificate(tmp_path)
    async with tls_front(redis_server.port, certificate, key) as port:
        redis = connect(f"rediss://127.0.0.1:{port}", timeout_seconds=2.0)
        with pytest.raises(Unavailable) as raised:
            await world.router(redis=redis).snapshot()
        assert "certificate" in str(raised.value.__cause__).lower()
        await redis.aclose()


async def test_a_password_of_its_own_wins_over_the_urls() -> None:
    with running_redis(password="opens") as server:
        url = f"redis://:wrong@127.0.0.1:{server.port}/0"
        await serve_a_block(connect(url, password=SecretStr("opens"), timeout_seconds=2.0))


async def test_a_wrong_password_is_told(world: World) -> None:
    with running_redis(password="right") as server:
        redis = connect(f"redis://:wrong@127.0.0.1:{server.port}", timeout_seconds=2.0)
        with pytest.raises(Unavailable) as raised:
            await world.router(redis=redis).snapshot()
        cause = str(raised.value.__cause__)
        assert "password" in cause.lower()
        assert "wrong@" not in cause
        await redis.aclose()


@pytest.mark.parametrize("binary", SERVERS, ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("broken", "mended"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    ],
    ids=["full", "demoted"],
)
async def test_a_server_that_takes_no_writes_is_unavailable_until_it_does(
    binary: Path, broken: tuple[str, ...], mended: tuple[str, ...]
) -> None:
    with running_redis(binary=binary) as server:
        redis = connect(server.url, timeout_seconds=2.0)
        world = World(redis, "unfit")
        await world.publish(lease("w"))
        router = world.router()
        worker = load_of(await router.snapshot())
        server.command(*broken)
        with pytest.raises(Unavailable, match="Redis cannot be used now"):
            await router.reserve_prefill(ticket(), block(), demand(), worker)
        server.command(*mended)
        await router.heartbeat()
        assert await world.is_empty()
        await world.aclose()
        await redis.aclose()


async def test_a_server_that_is_not_there_is_told_within_the_time(world: World) -> None:
    with running_redis() as server:
        port = server.port
    redis = connect(f"redis://127.0.0.1:{port}", timeout_seconds=0.5)
    async with asyncio.timeout(10.0):
        with pytest.raises(Unavailable, match="Redis cannot be used now"):
            await world.router(redis=redis).snapshot()
    await redis.aclose()


@pytest.mark.parametrize("is_cluster", [False, True])
@pytest.mark.parametrize("url", ["http://:secret@host", "redis://:secret@host:notaport"])
def test_an_unusable_url_is_refused_without_showing_the_password(
    url: str, is_cluster: bool
) -> None:
    with pytest.raises(ConfigurationError, match="redis url") as raised:
        connect(url, cluster=is_cluster, timeout_seconds=2.0)
    assert "secret" not in str(raised.value)


def test_the_named_binary_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = tmp_path / "my-server"
    named.touch(mode=0o755)
    monkeypatch.setenv(BINARY_VARIABLE, str(named))
    assert find_redis_server() == named
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match=BINARY_VARIABLE):
        find_redis_server()


def test_a_server_on_path_comes_before_a_packaged_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_path = tmp_path / "redis-server"
    on_path.touch(mode=0o755)
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == on_path


def test_a_server_keeps_nothing_over_a_restart() -> None:
    with running_redis() as server:
        server.command("SET", "key", "value")
        assert "value" in server.command("GET", "key")
        server.stop()
        server.start()
        assert server.command("GET", "key") == "$-1\r\n"
