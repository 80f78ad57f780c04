"""Loopback ports: free ones, and a clear word about a taken one."""

import socket

import pytest

from sangam_core.errors import ConfigurationError
from sangam_router.local.ports import LOOPBACK, free_ports, is_free, require_free


def test_free_ports_are_different_and_below_the_ephemeral_range() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(20_000 <= port < 32_000 for port in ports)


def test_a_taken_port_is_named_with_the_option_that_chooses_another() -> None:
    with socket.socket() as server:
        server.bind((LOOPBACK, 0))
        server.listen()
        port = server.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(ConfigurationError, match=rf"port {port} .* is taken; .*--port"):
            require_free(port, "--port")
    assert require_free(port, "--port") == port
