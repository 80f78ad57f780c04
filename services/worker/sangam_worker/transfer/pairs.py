"""Pairs of workers: each has one channel and one thread that blocks on it.

``open_pairs`` owns them. The thread is a daemon, so that a transfer that cannot be woken does not
hold up the end of the process.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
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
        peer_url: where the other end can be spoken to.
        unused: set while no transfer holds it open.
        num_waiting: transfers that would use it next.
    """

    def __init__(
        self,
        key: PairKey,
        transport: KVTransport,
        communicator: str,
        offer: str,
        peer_url: str,
    ) -> None:
        self.key = key
        self.communicator = communicator
        self.offer = offer
        self.peer_url = peer_url
        self.last_used_seconds = time.monotonic()
        self.unused = asyncio.Event()
        self.unused.set()
        self.num_waiting = 0
        self._num_users = 0
        self._transport = transport
        self._given_up = threading.Event()
        self._channel: KVChannel | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=f"kv {key.side} {key.peer_id}", daemon=True).start()

    @property
    def is_connected(self) -> bool:
        """Whether the channel has been made."""
        return self._channel is not None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Hold it open: it is not closed for another's sake meanwhile."""
        self._num_users += 1
        self.unused.clear()
        try:
            yield
        finally:
            self._num_users -= 1
            self.last_used_seconds = time.monotonic()
            if not self._num_users:
                self.unused.set()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Say that it is wanted next."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    async def transfer(self, pages: tuple[int, ...], timeout_seconds: float) -> int:
        """Move pages on the pair's thread, connecting first if need be; returns bytes.

        Ends only when the thread is done with the pages. ``TransferError`` as channels raise it.
        """
        self._stop_if_aborted()
        deadline = time.monotonic() + timeout_seconds
        return await self._on_thread(lambda: self._move(pages, deadline))

    def abort(self) -> None:
        """End the channel, or its connecting; the thread ends when its call has."""
        self._given_up.set()
        if self._channel is not None:
            self._channel.abort()
        self._jobs.put(None)

    def _move(self, pages: tuple[int, ...], deadline: float) -> int:
        self._stop_if_aborted()
        channel = self._channel or self._connected(deadline)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransferError("the transfer's deadline has passed")
        move = channel.send if self.key.side is Side.SENDER else channel.receive
        return move(pages, left)

    def _connected(self, deadline: float) -> KVChannel:
        left = deadline - time.monotonic()
        channel = self._channel = self._transport.connect(
            self.key.side, self.communicator, self.offer, left, self._given_up
        )
        if self._given_up.is_set():  # while it connected
            channel.abort()
        return channel

    def _stop_if_aborted(self) -> None:
        if self._given_up.is_set():
            raise TransferError(f"the pair with {self.key.peer_id} was closed")

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
