"""Pairs of workers: each has one channel and one thread that blocks on it.

``exchange`` owns them. The thread is a daemon, so that a transfer that cannot be woken does not
hold up the end of the process.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from sangam_core.errors import TransferError
from sangam_worker.transfer.protocol import KVChannel, KVTransport, Side

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True)
class PairKey:
    """Two lives of two workers, and the direction between them."""

    side: Side
    peer_id: str
    peer_epoch: str
    own_epoch: str


class Pair:
    """One end of a pair: its channel, made on first use, and its thread.

    Attributes:
        communicator: the channel's name on both sides.
        offer: what it is connected with.
        turn: held by the transfer under way (the receiver's; the sender's thread keeps order).
    """

    def __init__(self, key: PairKey, transport: KVTransport, communicator: str, offer: str) -> None:
        self.key = key
        self.communicator = communicator
        self.offer = offer
        self.turn = asyncio.Lock()
        self.last_used_seconds = time.monotonic()
        self.is_aborted = False
        self.num_transfers = 0
        self._transport = transport
        self._channel: KVChannel | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=f"kv {key.side} {key.peer_id}", daemon=True).start()

    @property
    def is_connected(self) -> bool:
        """Whether the channel has been made."""
        return self._channel is not None

    async def transfer(self, pages: tuple[int, ...], timeout_seconds: float) -> int:
        """Move pages on the pair's thread, connecting first if need be; returns bytes.

        Ends only when the thread is done with the pages. ``TransferError`` as channels raise it.
        """
        if self.is_aborted:
            raise TransferError(f"the pair with {self.key.peer_id} was aborted")
        deadline = time.monotonic() + timeout_seconds
        self.num_transfers += 1
        try:
            return await self._on_thread(lambda: self._move(pages, deadline))
        finally:
            self.num_transfers -= 1
            self.last_used_seconds = time.monotonic()

    def abort(self) -> None:
        """End the channel; the thread ends when its call has."""
        self.is_aborted = True
        if self._channel is not None:
            self._channel.abort()
        self._jobs.put(None)

    def _move(self, pages: tuple[int, ...], deadline: float) -> int:
        if self.is_aborted:
            raise TransferError(f"the pair with {self.key.peer_id} was aborted")
        side = self.key.side
        if self._channel is None:
            left = deadline - time.monotonic()
            self._channel = self._transport.connect(side, self.communicator, self.offer, left)
            if self.is_aborted:  # while it connected
                self._channel.abort()
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransferError("the transfer's deadline has passed")
        move = self._channel.send if side is Side.SENDER else self._channel.receive
        return move(pages, left)

    async def _on_thread(self, job: Callable[[], _ResultT]) -> _ResultT:
        future: Future[_ResultT] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                future.set_exception(error)

        self._jobs.put(run)
        return await asyncio.shield(asyncio.wrap_future(future))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
