"""Two uvicorn servers in one event loop, and how they stop.

The public one stops taking requests first and lets those in flight finish; the internal one goes
on answering probes until then. Who is served is the composition root's business (``router``).
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from sangam_core.addresses import host_and_port, http_url
from sangam_core.errors import ConfigurationError
from sangam_router.connection import MAX_HEAD_BYTES, connections

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
"""Idle connections stay open longer than ingresses keep theirs (nginx: 60 s): whoever closes first
cuts off a request that the other side is just sending."""


class QuietServer(uvicorn.Server):
    """A server that leaves signals to ``main``: there are two of them in this process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


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
        config = uvicorn.Config(
            self.app,
            # The framing that the gate checks is h11's; httptools reads some of it differently.
            http=connections(head_seconds),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(shutdown_seconds)),
        )
        return QuietServer(config)


def listen(host: str, port: int, name: str) -> socket.socket:
    """Bind a port before anything else starts.

    Raises:
        ConfigurationError: it cannot be bound.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # Said to be TCP: asyncio sends at once (TCP_NODELAY) only on sockets that say so, and a
        # stream's chunks would each wait for the ACK of the one before.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        raise ConfigurationError(
            f"{name}: cannot listen on {host_and_port(host, port)}: {error}"
        ) from None
    listening.setblocking(False)
    listening.listen(_BACKLOG)
    return listening


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
