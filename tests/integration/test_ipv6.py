"""Workers that are reached by an IPv6 address: leases, blocks and transfers."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.integration.cluster import running_cluster
from tests.integration.load import Clients, differences, questions

from sangam_router.local.roles import RoleCounts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def has_ipv6() -> bool:
    """Containers may have none."""
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
async def test_workers_with_ipv6_addresses_serve_and_hand_over(tmp_path: Path) -> None:
    asked = questions(8)
    roles = RoleCounts(prefill=1, decode=2)
    # Bound to both families, since the cluster's own probes know 127.0.0.1.
    ipv6 = {"SANGAM_HOST": "::", "SANGAM_ADVERTISE_HOST": "::1"}
    async with (
        running_cluster(tmp_path / "6", roles=roles, num_routers=1, worker_env=ipv6) as cluster,
        Clients(cluster) as clients,
    ):
        answers, _ = await clients.ask_all(asked)
        fleet = await cluster.admin("/admin/fleet")
        urls = [urlsplit(worker["url"]) for worker in fleet["workers"]]
        targets = await cluster.admin("/admin/prometheus-targets")
        assert await cluster.total("sangam_retries_total") == 0
        await cluster.assert_idle()
    assert {url.hostname for url in urls} == {"::1"}
    assert {url.netloc for url in urls} == {f"[::1]:{url.port}" for url in urls}
    assert {target for group in targets for target in group["targets"]} == {
        url.netloc for url in urls
    }
    async with (
        running_cluster(tmp_path / "4", roles=roles, num_routers=1) as cluster,
        Clients(cluster) as clients,
    ):
        assert not differences(asked, (await clients.ask_all(asked))[0], answers)
