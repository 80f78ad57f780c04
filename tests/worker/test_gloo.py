"""KV over real gloo: between two processes, one of which is killed, and within one."""

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


def test_an_address_of_another_machine_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match=r"SANGAM_ADVERTISE_HOST '8\.8\.8\.8'"):
        GlooTransport(ToyPool(), "8.8.8.8")
