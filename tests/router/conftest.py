"""What the router's tests share."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.router.builders import write_model_folder
from tests.router.leases import Fleet

from sangam_router.local.redis_server import RedisServer, running_redis


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A real server, empty at first; tests keep apart by namespace."""
    with running_redis() as server:
        yield server


@pytest.fixture
async def leased(redis_server: RedisServer) -> AsyncIterator[Fleet]:
    """Publishes leases of stub workers in a namespace of its own."""
    async with Fleet(redis_server.url) as fleet:
        yield fleet
