"""The process's socket and its HTTP server: binding, the port file, starting and stopping.

``process`` starts and ends it; what is served is ``api``'s business.
"""

import asyncio
import errno
import random
import socket
from collections.abc import Sequence
from pathlib import Path

from starlette.types import ASGIApp

from sangam_core.addresses import host_and_port
from sangam_core.errors import ConfigurationError
from sangam_core.http_server import http_server
from sangam_worker.api.errors import error_form

_BACKLOG = 2048
_SHUTDOWN_SECONDS = 5.0
_DEAD_PEER_MILLISECONDS = 20_000
"""Unacknowledged data for this long (pings are data) ends a connection: its block is cancelled."""


def bind(host: str, ports: Sequence[int]) -> socket.socket:
    """Bind the first free port, tried in random order so that workers do not race for one.

    Raises:
        ConfigurationError: none is free, or the host is not this machine's.
    """
    for port in random.sample(ports, len(ports)):
        try:
            return _bound(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigurationError(
                    f"SANGAM_HOST/SANGAM_PORT: cannot bind {host_and_port(host, port)}: {error}"
                ) from None
    raise ConfigurationError(
        f"SANGAM_PORT/SANGAM_PORT_RANGE: no free port in {ports[0]}-{ports[-1]} of {host}"
    )


def write_port_file(path: Path, port: int) -> None:
    """Write the port so that a reader sees all of it or nothing."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(f"{port}\n")
    partial.replace(path)


class HttpServer:
    """uvicorn on a bound socket, as a task of the running event loop."""

    def __init__(self, app: ASGIApp, sock: socket.socket, *, head_seconds: float) -> None:
        self._server = http_server(
            app,
            head_seconds=head_seconds,
            error_form=error_form,
            shutdown_seconds=_SHUTDOWN_SECONDS,
        )
        self._socket = sock
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve from now on."""
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise ConfigurationError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Take no more connections, end those that are idle, wait a little for the others."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


def _bound(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # Said to be TCP: asyncio sends at once (TCP_NODELAY) only on sockets that say so. Otherwise an
    # answer's second write on a kept connection waits 40 ms for the first one's delayed ACK.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted sockets inherit it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_MILLISECONDS)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
