"""The socket that our HTTP servers listen on: any patience is told to the system."""

import math
import socket

import pytest

from sangam_core.http_server import listening_socket


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
@pytest.mark.parametrize(
    ("seconds", "milliseconds"),
    [(60.0, 60_000), (1e-5, 1), (1e9, 2**31 - 1), (math.inf, 2**31 - 1)],
)
def test_any_patience_with_dead_peers_is_told_to_the_system(
    seconds: float, milliseconds: int
) -> None:
    with listening_socket("127.0.0.1", 0, dead_peer_seconds=seconds) as listening:
        told = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert told == milliseconds
