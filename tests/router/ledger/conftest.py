"""A real server for the ledger's tests: one for all of them, a namespace for each.

Redis 6.2, the oldest that must work, where a package brought it; ``test_connect`` tries the others.
"""

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.router.ledger.world import World

from sangam_router.ledger.connect import connect
from sangam_router.ledger.scripts import Client
from sangam_router.local.redis_server import RedisServer, packaged_servers, running_redis

_numbers = itertools.count()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    oldest = next((path for path in packaged_servers() if path.name == "redis-server"), None)
    with running_redis(binary=oldest) as server:
        yield server


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Client]:
    client = connect(redis_server.url, timeout_seconds=2.0)
    yield client
    await client.aclose()


@pytest.fixture
async def world(redis: Client) -> AsyncIterator[World]:
    """Routers and workers of one deployment."""
    world = World(redis, namespace=f"test{next(_numbers)}")
    yield world
    await world.aclose()
