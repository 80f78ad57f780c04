"""KV transfers as both sides of a pair see them: who asks, who agrees, what failure costs.

The receiver's pages are reserved before it asks. Decides refusals, the making and ending of
pairs, and deadlines; moving bytes is the transport's, what becomes of the block the loop's.
Lives on the event loop; blocking calls run on the pairs' threads.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import structlog

from sangam_core.errors import TransferError
from sangam_core.wire import BlockKey, KVSource, LossReason
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.standing import Standing
from sangam_worker.tracking import Moved
from sangam_worker.transfer.pairs import Pair, PairKey
from sangam_worker.transfer.places import ReceivePlaces
from sangam_worker.transfer.pool import KVGeometry
from sangam_worker.transfer.protocol import KVTransport, Side
from sangam_worker.transfer.wire import TransferAccepted, TransferRefusal, TransferRequest

log = structlog.get_logger(__name__)

AskSender = Callable[[str, TransferRequest, float], Awaitable[TransferAccepted]]
"""Asks the sender at a URL, within seconds. Raises ``TransferRefused`` or ``TransferError``."""

_IDLE_PAIR_SECONDS = 600.0
"""A pair that moves nothing for this long is given up: its peer may be gone for good."""


class TransferRefused(TransferError):
    """The sender said no (409 on its side)."""

    def __init__(self, refusal: TransferRefusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class KeepsBlocks(Protocol):
    """The GPU thread, as far as transfers go."""

    def pin(self, key: BlockKey) -> "Future[tuple[int, ...] | None]":
        """Pin a held block's pages for sending."""
        ...

    def unpin(self, key: BlockKey) -> None:
        """Take a pin back; the block waits on."""
        ...

    def transfer_ended(self, key: BlockKey, result: Moved | LossReason) -> None:
        """Unpin a block, sent, received or failed."""
        ...


class KVExchange:
    """One worker's transfers.

    Args:
        deadline_seconds: longest time for a transfer, from when the pages are reserved.
    """

    def __init__(
        self,
        *,
        standing: Standing,
        blocks: KeepsBlocks,
        transport: KVTransport,
        geometry: KVGeometry,
        ask_sender: AskSender,
        metrics: WorkerMetrics,
        deadline_seconds: float,
    ) -> None:
        self._standing = standing
        self._blocks = blocks
        self._transport = transport
        self._geometry = geometry
        self._ask_sender = ask_sender
        self._metrics = metrics
        self._deadline_seconds = deadline_seconds
        self._places = ReceivePlaces(transport.receives_at_once)
        self._pairs: dict[PairKey, Pair] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[BlockKey, asyncio.Task[None]] = {}

    @property
    def num_pairs(self) -> int:
        """Pairs that are open, in either direction."""
        return len(self._pairs)

    # -- receiver -------------------------------------------------------------------------

    def fetch(self, key: BlockKey, source: KVSource, pages: tuple[int, ...]) -> None:
        """Start fetching a block's KV into reserved pages."""
        task = asyncio.create_task(self._fetch(key, source, pages), name=f"fetch {key}")
        self._own(task)
        self._waiting[key] = task
        # A callback, since a task that is cancelled before its first step runs no handler.
        task.add_done_callback(lambda ended: self._fetch_ended(key, ended))

    def give_up(self, key: BlockKey) -> None:
        """End a fetch that has not begun; one under way ends by itself."""
        task = self._waiting.pop(key, None)
        if task is not None:
            task.cancel()

    async def _fetch(self, key: BlockKey, source: KVSource, pages: tuple[int, ...]) -> None:
        started = time.monotonic()
        deadline = started + self._deadline_seconds
        pair_key = PairKey(Side.RECEIVER, source.worker_id, source.epoch, self._standing.epoch)
        try:
            num_bytes = await self._receive(pair_key, key, source, pages, deadline)
        except Exception as error:  # noqa: BLE001 - the pages must be unpinned, come what may
            self._failed("received", key, source.worker_id, error)
        else:
            seconds = time.monotonic() - started
            self._metrics.transfer_ended("received", seconds, num_bytes)
            self._blocks.transfer_ended(key, Moved(seconds, num_bytes))

    def _fetch_ended(self, key: BlockKey, task: asyncio.Task[None]) -> None:
        self._waiting.pop(key, None)
        if task.cancelled():
            cancelled = LossReason(code="cancelled", message="cancelled before its KV came")
            self._blocks.transfer_ended(key, cancelled)

    async def _receive(
        self,
        pair_key: PairKey,
        key: BlockKey,
        source: KVSource,
        pages: tuple[int, ...],
        deadline: float,
    ) -> int:
        """Receive once it is this block's turn; a channel that the sender lost is made anew."""
        for is_last_try in (False, True):
            pair = await self._turn(pair_key, deadline)
            try:
                async with self._place(pair, deadline):
                    self._waiting.pop(key, None)
                    try:
                        return await self._ask_and_receive(pair, key, source, pages, deadline)
                    except TransferRefused as error:
                        if error.refusal.code != "stale_channel" or is_last_try:
                            raise
                        self._close(pair)
                    except Exception:
                        self._close(pair)  # its ends may disagree on what has been moved
                        raise
            finally:
                pair.turn.release()
        raise AssertionError("the last try returns or raises")

    async def _turn(self, key: PairKey, deadline: float) -> Pair:
        """The pair, once no other transfer is under way on it; its ``turn`` is held."""
        while True:
            pair = self._pairs.get(key) or await self._new_receiver(key)
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await pair.turn.acquire()
            except TimeoutError:
                raise TransferError("its turn did not come before the deadline") from None
            if not pair.is_aborted:
                return pair
            pair.turn.release()

    def _place(self, pair: Pair, deadline: float) -> AbstractAsyncContextManager[None]:
        left = deadline - time.monotonic()
        return self._places.taken(is_connected=pair.is_connected, timeout_seconds=left)

    async def _new_receiver(self, key: PairKey) -> Pair:
        offer = await asyncio.to_thread(self._transport.offer)
        if key not in self._pairs:
            self._open(key, secrets.token_hex(8), offer)
        return self._pairs[key]

    async def _ask_and_receive(
        self,
        pair: Pair,
        key: BlockKey,
        source: KVSource,
        pages: tuple[int, ...],
        deadline: float,
    ) -> int:
        left = deadline - time.monotonic()
        request = TransferRequest(
            key=key,
            sender_epoch=source.epoch,
            receiver_id=self._standing.worker_id,
            receiver_epoch=self._standing.epoch,
            model=self._standing.model,
            kv=self._geometry,
            transport=self._transport.name,
            num_pages=len(pages),
            communicator=pair.communicator,
            offer=None if pair.is_connected else pair.offer,
            timeout_seconds=left,
        )
        accepted = await self._ask_sender(source.url, request, left)
        if accepted.sender_epoch != source.epoch:
            raise TransferError(f"{source.worker_id} answered with another epoch")
        return await pair.transfer(pages, deadline - time.monotonic())

    # -- sender ---------------------------------------------------------------------------

    async def serve(self, request: TransferRequest) -> TransferAccepted:
        """Begin to send a held block. ``TransferRefused`` when it cannot be."""
        standing = self._standing
        self._check(request)
        pages = await asyncio.wrap_future(self._blocks.pin(request.key))
        if pages is None:
            raise self._refused("not_held", f"block {request.key} does not wait here")
        try:
            if len(pages) != request.num_pages:
                message = f"the block has {len(pages)} pages, not {request.num_pages}"
                raise self._refused("mismatch", message)
            pair = self._sender_pair(request)
        except TransferRefused:
            self._blocks.unpin(request.key)
            raise
        self._own(asyncio.create_task(self._send(pair, request, pages), name=f"send {request.key}"))
        return TransferAccepted(sender_id=standing.worker_id, sender_epoch=standing.epoch)

    def _check(self, request: TransferRequest) -> None:
        standing = self._standing
        if request.sender_epoch != standing.epoch:
            message = f"{standing.worker_id} has epoch {standing.epoch}"
            raise self._refused("wrong_epoch", f"{message}, not {request.sender_epoch}")
        for name, ours, theirs in (
            ("model", standing.model, request.model),
            ("KV geometry", self._geometry, request.kv),
            ("transport", self._transport.name, request.transport),
        ):
            if ours != theirs:
                message = f"{name}: {ours} here, {theirs} at the receiver"
                if name == "transport":
                    message += "; both need the same SANGAM_KV_TRANSPORT"
                raise self._refused("mismatch", message)

    def _sender_pair(self, request: TransferRequest) -> Pair:
        key = PairKey(
            Side.SENDER, request.receiver_id, request.receiver_epoch, request.sender_epoch
        )
        pair = self._pairs.get(key)
        if pair is not None and pair.communicator != request.communicator:
            self._close(pair)  # the receiver gave it up
            pair = None
        if pair is not None:
            return pair
        if request.offer is None:
            raise self._refused("stale_channel", f"{request.communicator} is not connected here")
        return self._open(key, request.communicator, request.offer)

    async def _send(self, pair: Pair, request: TransferRequest, pages: tuple[int, ...]) -> None:
        started = time.monotonic()
        timeout_seconds = min(request.timeout_seconds, self._deadline_seconds)
        try:
            num_bytes = await pair.transfer(pages, timeout_seconds)
        except Exception as error:  # noqa: BLE001 - the pages must be unpinned, come what may
            self._close(pair)
            self._failed("sent", request.key, request.receiver_id, error)
        else:
            seconds = time.monotonic() - started
            self._metrics.transfer_ended("sent", seconds, num_bytes)
            self._blocks.transfer_ended(request.key, Moved(seconds, num_bytes))

    # -- both -----------------------------------------------------------------------------

    async def close_pairs(self) -> None:
        """End every pair; transfers under way fail."""
        for pair in tuple(self._pairs.values()):
            self._close(pair)

    async def close(self, timeout_seconds: float) -> None:
        """End every pair and wait a little for what is under way."""
        await self.close_pairs()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._transport.close)

    def _open(self, key: PairKey, communicator: str, offer: str) -> Pair:
        now = time.monotonic()
        for pair in tuple(self._pairs.values()):
            is_in_use = pair.num_transfers or pair.turn.locked()
            is_idle = not is_in_use and now - pair.last_used_seconds > _IDLE_PAIR_SECONDS
            is_former_life = (pair.key.side, pair.key.peer_id) == (key.side, key.peer_id)
            if is_idle or is_former_life:
                self._close(pair)
        pair = self._pairs[key] = Pair(key, self._transport, communicator, offer)
        return pair

    def _close(self, pair: Pair) -> None:
        pair.abort()
        if self._pairs.get(pair.key) is pair:
            del self._pairs[pair.key]

    def _failed(self, direction: str, key: BlockKey, peer_id: str, error: Exception) -> None:
        """Count and tell a failure, and let go of the block."""
        reason = error.refusal.code if isinstance(error, TransferRefused) else "failed"
        self._metrics.transfer_failed(direction, reason)
        fields = {"direction": direction, "key": str(key), "peer": peer_id, "error": str(error)}
        if isinstance(error, TransferError):
            log.warning("KV transfer failed", **fields)
        else:
            log.error("KV transfer failed by a bug", **fields, exc_info=error)
        self._blocks.transfer_ended(key, _failure(str(error)))

    def _refused(self, code: str, message: str) -> TransferRefused:
        return TransferRefused(TransferRefusal.model_validate({"code": code, "message": message}))

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _failure(message: str) -> LossReason:
    return LossReason(code="transfer_failed", message=message)
