"""KV transfers as both sides of a pair see them: who asks, who agrees, what failure costs.

The receiver's pages are reserved before it asks. Decides refusals, when pairs are needed, and
deadlines; moving bytes is the transport's, what becomes of the block the loop's. Lives on the event
loop; blocking calls run on the pairs' threads.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import (
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from typing import Protocol
from weakref import WeakValueDictionary

import structlog

from sangam_core.errors import TransferError
from sangam_core.wire import BlockKey, KVSource, LossReason
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.standing import Standing
from sangam_worker.tracking import Moved
from sangam_worker.transfer.open_pairs import OpenPairs
from sangam_worker.transfer.pairs import Pair, PairKey
from sangam_worker.transfer.places import TransferPlaces
from sangam_worker.transfer.pool import KVGeometry
from sangam_worker.transfer.protocol import KVTransport, Side
from sangam_worker.transfer.refusals import TransferRefused, check_fits, refused
from sangam_worker.transfer.wire import PairClosed, TransferAccepted, TransferRequest

log = structlog.get_logger(__name__)

AskSender = Callable[[str, TransferRequest, float], Awaitable[TransferAccepted]]
"""Asks the sender at a URL, within seconds. Raises ``TransferRefused`` or ``TransferError``."""

TellClosed = Callable[[str, PairClosed], Awaitable[None]]
"""Tells the worker at a URL that a pair goes, and waits for its end. Raises ``TransferError``."""

_GRACE_SECONDS = 5.0
"""A transfer that goes on for so long after its block was dropped is with a peer that is gone."""


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
        tell_closed: TellClosed,
        metrics: WorkerMetrics,
        deadline_seconds: float,
    ) -> None:
        self._standing = standing
        self._blocks = blocks
        self._transport = transport
        self._geometry = geometry
        self._ask_sender = ask_sender
        self._tell_closed = tell_closed
        self._metrics = metrics
        self._deadline_seconds = deadline_seconds
        self._receiving = TransferPlaces(transport.transfers_each_way, "received")
        self._sending = TransferPlaces(transport.transfers_each_way, "sent")
        self._pairs = OpenPairs(transport, self._tell_peer, self._start)
        self._turns: WeakValueDictionary[PairKey, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetching: dict[BlockKey, asyncio.Task[None]] = {}
        self._under_way: dict[BlockKey, Pair] = {}

    @property
    def num_pairs(self) -> int:
        """Pairs that are open, in either direction."""
        return len(self._pairs)

    # -- receiver -------------------------------------------------------------------------

    def fetch(self, key: BlockKey, source: KVSource, pages: tuple[int, ...]) -> None:
        """Start fetching a block's KV into reserved pages."""
        task = self._start(self._fetch(key, source, pages), f"fetch {key}")
        self._fetching[key] = task
        # A callback, since a task that is cancelled before its first step runs no handler.
        task.add_done_callback(lambda ended: self._fetch_ended(key, ended))

    def give_up(self, key: BlockKey) -> None:
        """End a transfer that nobody wants any more, unless it moves bytes: then let it end."""
        if (pair := self._under_way.get(key)) is not None:
            seconds = _GRACE_SECONDS if pair.is_connected else 0.0
            asyncio.get_running_loop().call_later(seconds, self._end_if_under_way, key, pair)
        elif (task := self._fetching.get(key)) is not None:
            task.cancel()

    def _end_if_under_way(self, key: BlockKey, pair: Pair) -> None:
        if self._under_way.get(key) is pair:
            self._pairs.fail(pair)

    async def _fetch(self, key: BlockKey, source: KVSource, pages: tuple[int, ...]) -> None:
        started = time.monotonic()
        deadline = started + self._deadline_seconds
        pair_key = PairKey(Side.RECEIVER, source.worker_id, source.epoch, self._standing.epoch)
        try:
            async with self._turn(pair_key, deadline):
                num_bytes = await self._receive(pair_key, key, source, pages, deadline)
        except Exception as error:  # noqa: BLE001 - the pages must be unpinned, come what may
            self._failed("received", key, source.worker_id, error)
        else:
            seconds = time.monotonic() - started
            self._metrics.transfer_ended("received", seconds, num_bytes)
            self._blocks.transfer_ended(key, Moved(seconds, num_bytes))

    def _fetch_ended(self, key: BlockKey, task: asyncio.Task[None]) -> None:
        self._fetching.pop(key, None)
        if task.cancelled():
            cancelled = LossReason(code="cancelled", message="cancelled before its KV came")
            self._blocks.transfer_ended(key, cancelled)

    @asynccontextmanager
    async def _turn(self, key: PairKey, deadline: float) -> AsyncIterator[None]:
        """Wait until no other block is fetched from the same sender."""
        turn = self._turns.setdefault(key, asyncio.Lock())
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await turn.acquire()
        except TimeoutError:
            raise TransferError("its turn did not come before the deadline") from None
        try:
            yield
        finally:
            turn.release()

    async def _receive(
        self,
        pair_key: PairKey,
        key: BlockKey,
        source: KVSource,
        pages: tuple[int, ...],
        deadline: float,
    ) -> int:
        """Receive once there is a place; a channel that the sender lost is made anew."""
        while True:
            pair = self._pairs.get(pair_key)
            async with AsyncExitStack() as held:
                await held.enter_async_context(_place(self._receiving, pair, deadline))
                if pair is not self._pairs.get(pair_key):
                    continue  # closed meanwhile: a new one needs a place of the other kind
                pair = pair or await self._new_receiver(pair_key, source.url)
                held.enter_context(self._used_by(key, pair))
                may_be_stale = pair.is_connected
                try:
                    return await self._ask_and_receive(pair, key, source, pages, deadline)
                except TransferRefused as error:
                    if error.refusal.code != "stale_channel" or not may_be_stale:
                        raise
                    self._pairs.drop(pair)
                except Exception:
                    self._pairs.fail(pair)
                    raise

    async def _new_receiver(self, key: PairKey, url: str) -> Pair:
        offer = await asyncio.to_thread(self._transport.offer)
        return await self._pairs.open(key, secrets.token_hex(8), offer, url)

    async def _ask_and_receive(
        self,
        pair: Pair,
        key: BlockKey,
        source: KVSource,
        pages: tuple[int, ...],
        deadline: float,
    ) -> int:
        left = deadline - time.monotonic()
        if left <= 0:  # others' pairs were closed for this one first, or the process stood still
            raise TransferError("the deadline passed before its sender was asked")
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
        if self._pairs.get(pair.key) is not pair:
            # Ended while its sender kept it waiting, which had no end of it when it was told.
            await self._tell_peer(pair, is_failure=True)
        return await pair.transfer(pages, deadline - time.monotonic())

    # -- sender ---------------------------------------------------------------------------

    async def serve(self, request: TransferRequest, receiver_url: str = "") -> TransferAccepted:
        """Begin to send a held block, when there is a place. ``TransferRefused`` if it cannot be.

        Until it answers, the receiver has nothing on its device that would wait for this one's.

        Args:
            receiver_url: where to tell the receiver when this end of the pair goes.
        """
        deadline = time.monotonic() + min(request.timeout_seconds, self._deadline_seconds)
        check_fits(request, self._standing, self._geometry, self._transport.name)
        async with AsyncExitStack() as held:
            known = self._known_pair(request)
            try:
                await held.enter_async_context(_place(self._sending, known, deadline))
            except TransferError as error:
                raise refused("busy", str(error)) from None
            pages = await asyncio.wrap_future(self._blocks.pin(request.key))
            if pages is None:
                raise refused("not_held", f"block {request.key} does not wait here")
            try:
                if len(pages) != request.num_pages:
                    message = f"the block has {len(pages)} pages, not {request.num_pages}"
                    raise refused("mismatch", message)
                pair = await self._sender_pair(request, receiver_url)
            except BaseException:
                self._blocks.unpin(request.key)
                raise
            held.enter_context(self._used_by(request.key, pair))
            sending = self._send(held.pop_all(), pair, request, pages, deadline)
            self._start(sending, f"send {request.key}")
        return TransferAccepted(
            sender_id=self._standing.worker_id, sender_epoch=self._standing.epoch
        )

    async def _sender_pair(self, request: TransferRequest, url: str) -> Pair:
        pair = self._known_pair(request)
        if pair is not None:
            return pair
        assert request.offer is not None
        key = _sender_key(request)
        return await self._pairs.open(key, request.communicator, request.offer, url)

    def _known_pair(self, request: TransferRequest) -> Pair | None:
        """The open pair that the receiver means; ``None`` where it offers a new one."""
        pair = self._pairs.get(_sender_key(request))
        if pair is not None and pair.communicator == request.communicator:
            return pair
        if request.offer is None:
            raise refused("stale_channel", f"{request.communicator} is not connected here")
        return None

    async def _send(
        self,
        held: AsyncExitStack,
        pair: Pair,
        request: TransferRequest,
        pages: tuple[int, ...],
        deadline: float,
    ) -> None:
        started = time.monotonic()
        async with held:
            try:
                num_bytes = await pair.transfer(pages, deadline - started)
            except Exception as error:  # noqa: BLE001 - the pages must be unpinned, come what may
                self._pairs.fail(pair)
                self._failed("sent", request.key, request.receiver_id, error)
            else:
                seconds = time.monotonic() - started
                self._metrics.transfer_ended("sent", seconds, num_bytes)
                self._blocks.transfer_ended(request.key, Moved(seconds, num_bytes))

    # -- both -----------------------------------------------------------------------------

    async def closed_by_peer(self, closed: PairClosed) -> None:
        """The other end of a pair goes; after a failure there, what is under way fails here too."""
        await self._pairs.closed_by_peer(closed.communicator, is_failure=closed.is_failure)

    async def close_pairs(self) -> None:
        """End every pair and whatever waits for one; transfers under way fail."""
        for key in self._fetching.keys() - self._under_way.keys():
            self.give_up(key)
        await self._pairs.close_all()

    async def close(self, timeout_seconds: float) -> None:
        """End every pair and wait a little for what is under way."""
        await self.close_pairs()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._transport.close)

    @contextmanager
    def _used_by(self, key: BlockKey, pair: Pair) -> Iterator[None]:
        """Hold a pair open for a block's transfer."""
        with pair.used():
            self._under_way[key] = pair
            try:
                yield
            finally:
                self._under_way.pop(key, None)

    async def _tell_peer(self, pair: Pair, is_failure: bool) -> None:
        """Let the other end be closed too: it holds memory, and may wait for this one."""
        if pair.peer_url:
            closed = PairClosed(communicator=pair.communicator, is_failure=is_failure)
            with suppress(TransferError):  # it finds out when it needs the pair, if it is there
                await self._tell_closed(pair.peer_url, closed)

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

    def _start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@asynccontextmanager
async def _place(places: TransferPlaces, pair: Pair | None, deadline: float) -> AsyncIterator[None]:
    """Hold a place for a transfer by a pair, open or still to be opened."""
    is_connected = pair is not None and pair.is_connected
    left = deadline - time.monotonic()
    async with AsyncExitStack() as held:
        with nullcontext() if pair is None else pair.waited_for():
            taken = places.taken(is_connected=is_connected, timeout_seconds=left)
            await held.enter_async_context(taken)
        yield


def _sender_key(request: TransferRequest) -> PairKey:
    return PairKey(Side.SENDER, request.receiver_id, request.receiver_epoch, request.sender_epoch)


def _failure(message: str) -> LossReason:
    return LossReason(code="transfer_failed", message=message)
