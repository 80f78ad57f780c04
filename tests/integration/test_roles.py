"""Workers change their role while they serve, and no request fails."""

import asyncio
from pathlib import Path

import pytest
from tests.integration.cluster import running_cluster
from tests.integration.load import Clients, differences, questions

from sangam_core.placement import Role
from sangam_router.local.roles import RoleCounts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

DISPATCHES = "sangam_block_dispatches_total"


async def test_roles_change_under_load_without_a_failed_request(tmp_path: Path) -> None:
    asked = questions(24)
    async with (
        running_cluster(tmp_path, roles=RoleCounts(colocated=3)) as cluster,
        Clients(cluster) as clients,
    ):
        before, _ = await clients.ask_all(asked)
        switched = asyncio.Event()

        async def switch() -> None:
            first, second, _ = cluster.local.workers
            await cluster.order_role(first, Role.PREFILL)
            await cluster.desire_role(second, Role.DECODE)
            await cluster.has_role(first, Role.PREFILL)
            await cluster.has_role(second, Role.DECODE)
            switched.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(switch())
            while not switched.is_set():
                during, _ = await clients.ask_all(asked)
                assert not differences(asked, before, during)
        after, _ = await clients.ask_all(asked)
        assert not differences(asked, before, after)
        assert await cluster.total(DISPATCHES, stage="prefill", role="prefill") > 0
        assert await cluster.total(DISPATCHES, stage="decode", role="decode") > 0
        await cluster.assert_idle()
