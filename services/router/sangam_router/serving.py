"""Two uvicorn servers in one event loop, and how they stop.

The public one stops taking requests first and lets those in flight finish; the internal one goes
on answering probes until then. Who is served is the composition root's business (``router``).
"""

import asyncio
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from sangam_core.addresses import host_and_port, http_url
from sangam_core.errors import ConfigurationError, InvalidRequest
from sangam_core.http_server import QuietServer, http_server, listening_socket
from sangam_router.public_api.errors import http_error


@dataclass(frozen=True, slots=True)
class Listener:
    """An application and the socket that it is served on."""

    app: ASGIApp
    listening: socket.socket

    @property
    def url(self) -> str:
        """Where it is, for logs."""
        host, port = self.listening.getsockname()[:2]
        return http_url(host, port)

    def server(self, shutdown_seconds: float, *, head_seconds: float) -> QuietServer:
        """The server; not started."""
        return http_server(
            self.app,
            head_seconds=head_seconds,
            error_form=_error_form,
            shutdown_seconds=shutdown_seconds,
        )


def listen(host: str, port: int, name: str, *, dead_peer_seconds: float) -> socket.socket:
    """Bind a port before anything else starts (``listening_socket``).

    Raises:
        ConfigurationError: it cannot be bound.
    """
    try:
        return listening_socket(host, port, dead_peer_seconds=dead_peer_seconds)
    except OSError as error:
        raise ConfigurationError(
            f"{name}: cannot listen on {host_and_port(host, port)}: {error}"
        ) from None


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


async def stop(server: QuietServer, serving: "asyncio.Task[None]") -> None:
    """Stop a server gracefully; its own deadline cancels what does not finish."""
    server.should_exit = True
    await asyncio.wait({serving})


def _error_form(error: InvalidRequest) -> tuple[int, Mapping[str, Any]]:
    answer = http_error(error)
    return answer.status, answer.body
