"""What a KV transport is: pair communicators that move pages from one worker's pool to another's.

A channel joins one sender to one receiver, in one direction, one transfer at a time. The
receiver makes an offer, an opaque text that travels to the sender over the internal HTTP API (an
NCCL unique id, or the address of a gloo store), and both connect with it. Calls block and belong
in a thread of the channel's own (``pairs``). Nothing here knows torch or HTTP.
"""

import sys
import threading
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

ANY_NUMBER = sys.maxsize
"""Of transfers at once or of open pairs, where nothing bounds them."""


class Side(StrEnum):
    """Which end of a channel."""

    SENDER = "sender"
    RECEIVER = "receiver"


class KVChannel(Protocol):
    """One end of a connected pair."""

    def send(self, pages: Sequence[int], timeout_seconds: float) -> int:
        """Send pages of every layer, in order; returns bytes.

        Raises:
            TransferError: the peer is gone, the time is over, or the channel was aborted. The
                channel is of no use then.
        """
        ...

    def receive(self, pages: Sequence[int], timeout_seconds: float) -> int:
        """Receive into pages of every layer; returns bytes. Raises as ``send`` does."""
        ...

    def abort(self) -> None:
        """End the channel, from any thread; other channels do not notice.

        A call that waits ends as soon as the transport can make it, at the latest when its time
        is over. The peer's call fails. Aborting twice changes nothing.
        """
        ...


class KVTransport(Protocol):
    """Makes channels between this worker's pool and others'."""

    @property
    def name(self) -> str:
        """Both ends must name the same (``gloo``)."""
        ...

    @property
    def staging_bytes(self) -> int:
        """Device memory that transfers hold beside the pool, between transfers too."""
        ...

    @property
    def transfers_each_way(self) -> int:
        """How many channels may send at once, and how many receive; others are kept waiting."""
        ...

    @property
    def pairs_each_way(self) -> int:
        """How many channels of a side may be open, moving or not: what their memory is for.

        At least ``transfers_each_way``, where memory is scarce.
        """
        ...

    def offer(self) -> str:
        """What the sender needs to connect; made by the receiver, for one channel."""
        ...

    def connect(
        self,
        side: Side,
        communicator: str,
        offer: str,
        timeout_seconds: float,
        given_up: threading.Event,
    ) -> KVChannel:
        """Meet the other side; both must call it.

        Args:
            communicator: names the channel, the same on both sides, unique over time.
            given_up: set by another thread, it ends the call at once.

        Raises:
            TransferError: the other side did not come in time, or nobody wants it any more.
        """
        ...

    def ailment(self) -> str | None:
        """Why no KV can move to or from here, ``None`` when it can. Quick: readiness asks it."""
        ...

    def close(self) -> None:
        """Give back what the transport itself holds; channels are aborted by their owners."""
        ...
