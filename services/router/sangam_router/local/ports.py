"""Loopback ports for a local cluster: which are free, and a clear word when one is taken."""

import random
import socket

from sangam_core.errors import ConfigurationError

LOOPBACK = "127.0.0.1"

_CANDIDATES = range(20_000, 32_000)
"""Below the range that systems hand out to outgoing connections: a worker that is restarted has to
find its port free again, while its peers open connections all the time."""


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def require_free(port: int, option: str, host: str = LOOPBACK) -> int:
    """The port itself.

    Raises:
        ConfigurationError: it is taken; names the option that chooses another.
    """
    if not is_free(port, host):
        raise ConfigurationError(
            f"port {port} on {host} is taken; choose another with {option}, or stop what uses it"
        )
    return port


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Ports that are free now, all different.

    Raises:
        ConfigurationError: there are not enough.
    """
    found: list[int] = []
    for port in random.sample(_CANDIDATES, len(_CANDIDATES)):
        if len(found) == count:
            return found
        if is_free(port, host):
            found.append(port)
    raise ConfigurationError(
        f"no {count} free ports in {_CANDIDATES.start}..{_CANDIDATES.stop} on {host}"
    )
