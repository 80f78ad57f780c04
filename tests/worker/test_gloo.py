"""KV over real gloo: between two processes, one of which is killed, and within one."""

import socket

import pytest
from tests.worker.fakes import ToyPool
from tests.worker.transport_checks import ProcessChecks, TransportChecks

from sangam_core.errors import ConfigurationError
from sangam_worker.transfer.gloo import GlooTransport


class TestGloo(TransportChecks):
    def a_transport(self, pool: ToyPool) -> GlooTransport:
        return GlooTransport(pool, "127.0.0.1")


@pytest.mark.integration
class TestGlooBetweenProcesses(ProcessChecks):
    kind = "gloo"

    def a_transport(self, pool: ToyPool) -> GlooTransport:
        return GlooTransport(pool, "127.0.0.1")


def is_this_machine_s(host: str) -> bool:
    """Containers may have no IPv6, and macOS no second IPv4 address of the loopback."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            one.bind((host, 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "others"),
    [("127.0.0.1", ["127.0.0.2", "::1"]), ("127.0.0.2", ["127.0.0.1"]), ("::1", ["127.0.0.1"])],
)
def test_the_store_listens_at_the_worker_s_address_alone(host: str, others: list[str]) -> None:
    if not is_this_machine_s(host):
        pytest.skip(f"this machine has no {host}")
    transport = GlooTransport(ToyPool(), host)
    offered, _, port = transport.offer().rpartition(":")
    assert offered == host
    socket.create_connection((host, int(port)), timeout=5).close()
    for other in others:
        with pytest.raises(OSError, match=r"refused|unreachable|Cannot assign"):
            socket.create_connection((other, int(port)), timeout=5).close()
    transport.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5).close()


@pytest.mark.skipif(not is_this_machine_s("::1"), reason="this machine has no ::1")
class TestGlooOverIPv6(TransportChecks):
    def a_transport(self, pool: ToyPool) -> GlooTransport:
        return GlooTransport(pool, "::1")


def test_an_address_of_another_machine_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match=r"SANGAM_ADVERTISE_HOST '8\.8\.8\.8'"):
        GlooTransport(ToyPool(), "8.8.8.8")
