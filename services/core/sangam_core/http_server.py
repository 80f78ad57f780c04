"""What all our HTTP servers have in common: uvicorn with h11, bounded heads, no signals of its own.

Each service chooses its ports, starts the server and stops it; applications are theirs.
"""

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from sangam_core.connection import MAX_HEAD_BYTES, ErrorForm, connections

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
"""Idle connections stay open longer than ingresses keep theirs (nginx: 60 s), and routers and
workers keep those among themselves: whoever closes first cuts off a request that the other side is
just sending."""

_LONGEST_DEAD_PEER_SECONDS = (2**31 - 1) / 1000
"""Linux counts in milliseconds, in 32 bits: 24 days."""


def listening_socket(host: str, port: int, *, dead_peer_seconds: float) -> socket.socket:
    """A socket that listens; 0 takes a free port.

    Args:
        dead_peer_seconds: a peer that for so long acknowledges nothing of what it is sent, or takes
            nothing, loses its connection. A machine that vanished does not close one, and what is
            closed here stays until all that was written is taken.

    Raises:
        OSError: the address cannot be bound.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # Said to be TCP: asyncio sends at once (TCP_NODELAY) only on sockets that say so. Otherwise an
    # answer's second write, and each chunk of a stream, waits up to 40 ms for a delayed ACK.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted sockets inherit it
            seconds = min(dead_peer_seconds, _LONGEST_DEAD_PEER_SECONDS)
            milliseconds = max(1, int(seconds * 1000))  # 0 would be the system's default
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listening.bind(address)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


class QuietServer(uvicorn.Server):
    """A server that leaves signals to its process, which has more than it to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def http_server(
    app: ASGIApp, *, head_seconds: float, error_form: ErrorForm, shutdown_seconds: float
) -> QuietServer:
    """A server; not started.

    There is no bound on open connections: uvicorn's (``limit_concurrency``) counts those at rest
    and refuses probes like anything else, so that a supervisor would end a process for being
    busy. What is asked for is bounded behind it, by the line's length and by pages.

    Args:
        head_seconds: time that a request's head may take.
        error_form: how what is no HTTP, too large or too slow is told so.
        shutdown_seconds: time that requests under way get once the server shall stop.
    """
    config = uvicorn.Config(
        app,
        # The framing that the services check is h11's; httptools reads some of it differently.
        http=connections(head_seconds, error_form),
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
