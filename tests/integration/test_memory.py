"""Many requests leave nothing behind: no counter, no page, and (full size) no memory."""

from pathlib import Path

import pytest
from tests.integration.cluster import running_cluster
from tests.integration.knobs import NUM_MEMORY_REQUESTS
from tests.integration.load import Clients, questions

from sangam_router.local.roles import RoleCounts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

NUM_WARM_UP = 500
MOST_GROWTH = 1.05
ROLES = RoleCounts(prefill=1, decode=1, colocated=1)


async def test_nothing_is_held_after_many_requests(tmp_path: Path) -> None:
    asked = questions(40)
    async with (
        running_cluster(tmp_path, roles=ROLES, theta_tokens=300) as cluster,
        Clients(cluster) as clients,
    ):
        await clients.ask_all(asked)
        await cluster.assert_idle()


@pytest.mark.skipif(not NUM_MEMORY_REQUESTS, reason="set SANGAM_TEST_MEMORY_REQUESTS=2000")
async def test_memory_stays_flat_after_warm_up(tmp_path: Path) -> None:
    asked = questions(100)
    async with (
        running_cluster(tmp_path, roles=ROLES, theta_tokens=300) as cluster,
        Clients(cluster) as clients,
    ):
        for _ in range(-(-NUM_WARM_UP // len(asked))):
            await clients.ask_all(asked)
        before = cluster.resident_bytes()
        for _ in range(-(-NUM_MEMORY_REQUESTS // len(asked))):
            await clients.ask_all(asked)
        after = cluster.resident_bytes()
        print({name: (before[name] / 2**20, after[name] / 2**20) for name in before})  # noqa: T201
        grown = {name: after[name] / before[name] for name in before}
        assert all(growth <= MOST_GROWTH for growth in grown.values()), grown
        await cluster.assert_idle()
