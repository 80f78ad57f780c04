"""KV transport over NCCL, for GPUs: a communicator of two ranks for each pair, on side streams.

A transfer gathers pages into a staging slot, sends it, receives it into another and scatters it:
message by message, two under way, all of it queued ahead, so that neither host nor pass waits for
a message. The receiver's call returns when every layer is on its pages. The rank that makes the
offer is the receiver's; the offer is NCCL's unique id.

A call that fails has ended the communicator and waited until the device has let go of the pages.
A peer that dies without a word (no network between) is noticed at the deadline.
"""

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from sangam_core.errors import TransferError
from sangam_worker.transfer.chunks import Chunk, chunks_of, pages_in
from sangam_worker.transfer.lanes import Lane, Lanes, Mark, SideStreams
from sangam_worker.transfer.layer_rows import LayeredPool, LayerRows
from sangam_worker.transfer.memory import NUM_SLOTS, SLOT_BYTES
from sangam_worker.transfer.nccl_library import UNIQUE_ID_BYTES, Nccl
from sangam_worker.transfer.nccl_link import Link, open_link
from sangam_worker.transfer.protocol import KVChannel, Side

log = structlog.get_logger(__name__)

_RANKS = {Side.RECEIVER: 0, Side.SENDER: 1}

_STUCK_SECONDS = 5.0
"""A call that has not ended so long after it should have is stuck inside NCCL."""

_LET_GO_SECONDS = 5.0
"""A device that works on an aborted transfer for longer than this is reported ill."""

_LOOK_SECONDS = 0.001

_MoveChunk = Callable[[Lane, int, Chunk, "Mark | None", float], Mark]
"""Queues one message: lane, slot, what it carries, what has to be over before the slot may be
used, deadline. Returns what has to be over before it may be used again."""


class NcclTransport:
    """Channels from and to one pool.

    Args:
        library: what ``load_nccl`` returns.
        streams: the pool's device.
        max_ctas: thread blocks that a send or receive may occupy.
        slot_bytes: staging memory of a channel is two slots of this.
    """

    name = "nccl"

    def __init__(
        self,
        pool: LayeredPool,
        library: Nccl,
        streams: SideStreams,
        *,
        max_ctas: int,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self._library = library
        self._streams = streams
        self._max_ctas = max_ctas
        self._rows = LayerRows(pool)
        self._lanes = Lanes(streams, self._rows, slot_bytes)
        self._ailments: dict[int, str] = {}

    @property
    def staging_bytes(self) -> int:
        """Device memory that channels stage in; NCCL's own buffers are not counted."""
        return self._lanes.num_bytes

    def offer(self) -> str:
        """A new unique id, and the message size that it is meant for."""
        try:
            unique_id = bytes(self._library.get_unique_id())
        except Exception as error:
            raise TransferError(f"NCCL: {type(error).__name__}: {error}") from error
        return f"{self._lanes.slot_pages}:{unique_id.hex()}"

    def connect(
        self, side: Side, communicator: str, offer: str, timeout_seconds: float
    ) -> KVChannel:
        """Meet the other side by the offer's unique id."""
        rank = _RANKS[side]
        link = open_link(
            self._library,
            self._streams,
            num_ranks=2,
            rank=rank,
            unique_id=self._unique_id(offer),
            max_ctas=self._max_ctas,
            deadline=time.monotonic() + timeout_seconds,
        )
        try:
            with self._streams.entered():
                lane = self._lanes.take()
        except RuntimeError as error:
            link.end()
            raise TransferError(f"no memory to stage KV in: {error}") from error
        return NcclChannel(link, 1 - rank, self._rows, lane, self._lanes, self._note)

    def ailment(self) -> str | None:
        """Whether the device still works on a transfer that was aborted."""
        return next(iter(self._ailments.values()), None)

    def close(self) -> None:
        """Free the staging memory that no channel holds."""
        self._lanes.close()

    def _unique_id(self, offer: str) -> bytes:
        slot_pages, _, digits = offer.partition(":")
        try:
            unique_id = bytes.fromhex(digits)
        except ValueError:
            unique_id = b""
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise TransferError(f"offer {offer[:40]!r} is not PAGES:UNIQUE_ID")
        if slot_pages != str(self._lanes.slot_pages):
            raise TransferError(
                f"messages of {slot_pages} pages there, {self._lanes.slot_pages} here: the two "
                "workers are of different versions"
            )
        return unique_id

    def _note(self, channel: "NcclChannel", ailment: str | None) -> None:
        if ailment is None:
            self._ailments.pop(id(channel), None)
        else:
            log.error("KV transfer holds on to the device", ailment=ailment)
            self._ailments[id(channel)] = ailment


class NcclChannel:
    """One end of a communicator of two.

    Args:
        note: told of the channel's ailment, and of its end.
    """

    def __init__(
        self,
        link: Link,
        peer: int,
        rows: LayerRows,
        lane: Lane,
        lanes: Lanes,
        note: "Callable[[NcclChannel, str | None], None]",
    ) -> None:
        self._link = link
        self._peer = peer
        self._rows = rows
        self._lane: Lane | None = lane
        self._lanes = lanes
        self._note = note
        self._in_use = threading.Lock()

    def send(self, pages: Sequence[int], timeout_seconds: float) -> int:
        """Send pages, message by message."""
        return self._move(self._send_chunk, pages, timeout_seconds)

    def receive(self, pages: Sequence[int], timeout_seconds: float) -> int:
        """Receive pages, message by message."""
        return self._move(self._receive_chunk, pages, timeout_seconds)

    def abort(self) -> None:
        """End the channel. A call that waits sees it at once; what takes time is a thread's."""
        if self._link.give_up():
            threading.Thread(target=self._finish, name="kv abort", daemon=True).start()

    def _move(self, move: _MoveChunk, pages: Sequence[int], timeout_seconds: float) -> int:
        deadline = time.monotonic() + timeout_seconds
        watch = threading.Timer(timeout_seconds + _STUCK_SECONDS, self.abort)
        watch.daemon = True
        watch.start()
        try:
            with self._in_use:
                try:
                    return self._run(move, pages, deadline)
                except BaseException:
                    self._end()
                    raise
        finally:
            watch.cancel()

    def _run(self, move: _MoveChunk, pages: Sequence[int], deadline: float) -> int:
        if (lane := self._lane) is None:
            raise TransferError("the channel was aborted")
        index = self._rows.index(pages)
        lane.take_index(index)
        chunks = chunks_of(self._rows.num_layers, len(pages), self._lanes.slot_pages)
        free: list[Mark | None] = [None] * NUM_SLOTS
        for number, chunk in enumerate(chunks):
            slot = number % NUM_SLOTS
            free[slot] = move(lane, slot, chunk, free[slot], deadline)
        for end in lane.ends():
            self._link.wait(end.is_done, deadline)
        return self._rows.num_layers * len(pages) * self._rows.page_bytes

    def _send_chunk(
        self, lane: Lane, slot: int, chunk: Chunk, free: Mark | None, deadline: float
    ) -> Mark:
        staged = lane.slots[slot][: pages_in(chunk)]
        if free is not None:
            lane.copies.wait(free)
        lane.copies.launch(lambda: self._rows.gather(chunk, lane.index, staged))
        lane.wire.wait(lane.copies.mark())
        handle, peer = lane.wire.handle, self._peer
        self._link.call(lambda each: each.send(staged, peer, stream=handle), deadline)
        return lane.wire.mark()

    def _receive_chunk(
        self, lane: Lane, slot: int, chunk: Chunk, free: Mark | None, deadline: float
    ) -> Mark:
        staged = lane.slots[slot][: pages_in(chunk)]
        if free is not None:
            lane.wire.wait(free)
        handle, peer = lane.wire.handle, self._peer
        self._link.call(lambda each: each.recv(staged, peer, stream=handle), deadline)
        lane.copies.wait(lane.wire.mark())
        lane.copies.launch(lambda: self._rows.scatter(chunk, lane.index, staged))
        return lane.copies.mark()

    def _finish(self) -> None:
        """Bring about the end, after whoever uses the channel or in their place."""
        if self._in_use.acquire(timeout=_STUCK_SECONDS):
            try:
                self._end()
            finally:
                self._in_use.release()
        else:
            self._link.end()  # the call is stuck in NCCL, which this alone can wake

    def _end(self) -> None:
        """End the communicator, and wait until the device has let go of pages and staging."""
        self._link.end()
        lane, self._lane = self._lane, None
        if lane is None:
            return
        try:
            self._wait_for_device(lane.ends())
        except RuntimeError as error:  # a device that has failed for good
            self._note(self, f"the GPU failed in a KV transfer: {error}")
            self._lanes.lose(lane)
        else:
            self._note(self, None)
            self._lanes.give_back(lane)

    def _wait_for_device(self, ends: tuple[Mark, ...]) -> None:
        reported_at = time.monotonic() + _LET_GO_SECONDS
        while not all(end.is_done() for end in ends):
            if time.monotonic() > reported_at:
                self._note(self, "the GPU does not end a KV transfer that was aborted")
                reported_at = float("inf")
            time.sleep(_LOOK_SECONDS)
