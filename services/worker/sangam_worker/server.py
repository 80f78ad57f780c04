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
from sangam_core.http_server import http_server, listening_socket
from sangam_worker.api.errors import error_form

_SHUTDOWN_SECONDS = 5.0
_DEAD_PEER_SECONDS = 20.0
"""Unacknowledged data for this long (pings are data) ends a connection: its block is cancelled."""


def bind(host: str, ports: Sequence[int]) -> socket.socket:
    """Bind the first free port, tried in random order so that workers do not race for one.

    Raises:
        ConfigurationError: none is free, or the host is not this machine's.
    """
    for port in random.sample(ports, len(ports)):
        try:
            return listening_socket(host, port, dead_peer_seconds=_DEAD_PEER_SECONDS)
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
