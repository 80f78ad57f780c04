"""What all our HTTP servers have in common: uvicorn with h11, bounded heads, no signals of its own.

Each service binds its sockets, starts the server and stops it; applications are theirs.
"""

import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from sangam_core.connection import MAX_HEAD_BYTES, ErrorForm, connections

_KEEP_ALIVE_SECONDS = 75
"""Idle connections stay open longer than ingresses keep theirs (nginx: 60 s), and routers and
workers keep those among themselves: whoever closes first cuts off a request that the other side is
just sending."""


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
