"""One HTTP connection: how long it may keep its server waiting, and how it is told that it errs.

uvicorn bounds neither the time of a request's head nor that of a connection on which nothing ever
comes, and refuses what is no HTTP in plain text. Whoever holds many such connections open would
hold the server's sockets for ever. ``http_server`` uses it for every port; bodies have a deadline
of their own, the services' business, as is the form that an error has.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sangam_core.errors import InvalidRequest

MAX_HEAD_BYTES = 2**14
"""Largest request line with its fields; h11's own default."""

ErrorForm = Callable[[InvalidRequest], tuple[int, Mapping[str, Any]]]
"""A service's status and body for an error. The codes that come from here: ``request_timeout``
(408), ``head_too_large`` (431), ``malformed_request`` (400)."""


class Connection(H11Protocol):
    """uvicorn's, with a deadline for what comes before a request is answered.

    It runs from connecting, and on a kept connection from the first byte after an answer, until a
    request's head is complete. A connection that is kept without a byte is uvicorn's to close.
    """

    head_seconds: float
    error_form: ErrorForm
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has connected."""
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        """Bytes have come: of a head, or of what is being answered."""
        super().data_received(data)
        if self._is_answering:
            self._unset_deadline()
        elif self._is_at_rest:  # that was the end of a body whose answer had not waited for it
            self._unset_deadline()
            self._close_later()
        else:
            self._set_deadline()

    def on_response_complete(self) -> None:
        """An answer is out: the next request's head may have begun to come beside it."""
        super().on_response_complete()
        unread, _ = self.conn.trailing_data
        if unread and not self._is_answering:
            self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._unset_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or has too large a head (h11 tells uvicorn, uvicorn not us)."""
        unread, _ = self.conn.trailing_data
        if not self._is_answering and len(unread) > MAX_HEAD_BYTES:
            message = f"the request's head is larger than {MAX_HEAD_BYTES} bytes"
            self._refuse(InvalidRequest(message, code="head_too_large"))
        else:
            self._refuse(InvalidRequest("this is no valid HTTP request", code="malformed_request"))

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_at_rest(self) -> bool:
        unread, _ = self.conn.trailing_data
        return self.conn.their_state is h11.IDLE and not unread

    def _close_later(self) -> None:
        """Have uvicorn close what is kept without a byte: it stops waiting at every one."""
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _set_deadline(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.head_seconds, self._give_up)

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        unread, _ = self.conn.trailing_data
        if self.conn.their_state is h11.IDLE and unread:
            message = f"the request's head did not arrive within {self.head_seconds:g} s"
            self._refuse(InvalidRequest(message, code="request_timeout"))
        else:  # nothing was asked: a status would be taken for the next request's answer
            self.transport.close()

    def _refuse(self, error: InvalidRequest) -> None:
        """Say why, where that is still possible, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            status, content = self.error_form(error)
            body = json.dumps(content).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:  # an application that has not answered yet answers nobody
            self.cycle.disconnected = True
        self.transport.close()


def connections(head_seconds: float, error_form: ErrorForm) -> type[Connection]:
    """The class of connections whose requests' heads have so long, and whose errors look so."""

    class Bounded(Connection):
        """With both filled in: uvicorn makes connections itself."""

    Bounded.head_seconds = head_seconds
    Bounded.error_form = staticmethod(error_form)
    return Bounded
