"""One end of a communicator of two: moves KV pages between a pool and the other end.

A transfer gathers pages into a staging slot, sends it, receives it into another and scatters it:
message by message, two under way, all of it queued ahead, so that neither host nor pass waits for
a message. The receiver's call returns when every layer is on its pages.

Streams and staging are borrowed for one transfer: a channel that moves nothing holds none. A call
that fails has ended the communicator and waited until the device has let go of pages and staging.
A peer that dies without a word (no network between) is noticed at the deadline. Made by ``nccl``.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from sangam_worker.transfer.chunks import Chunk, chunks_of, pages_in
from sangam_worker.transfer.lanes import Lane, Lanes, Mark
from sangam_worker.transfer.layer_rows import LayerRows
from sangam_worker.transfer.memory import NUM_SLOTS
from sangam_worker.transfer.nccl_link import Link
from sangam_worker.transfer.protocol import Side

_STUCK_SECONDS = 5.0
"""A call that has not ended so long after it should have is stuck inside NCCL."""

_LET_GO_SECONDS = 5.0
"""A device that works on an aborted transfer for longer than this is reported ill."""

_LOOK_SECONDS = 0.001

_MoveChunk = Callable[[Lane, int, Chunk, "Mark | None", float], Mark]
"""Queues one message: lane, slot, what it carries, what has to be over before the slot may be
used, deadline. Returns what has to be over before it may be used again."""


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
        lanes: Lanes,
        note: "Callable[[NcclChannel, str | None], None]",
    ) -> None:
        self._link = link
        self._peer = peer
        self._rows = rows
        self._lanes = lanes
        self._note = note
        self._in_use = threading.Lock()

    def send(self, pages: Sequence[int], timeout_seconds: float) -> int:
        """Send pages, message by message."""
        return self._move(Side.SENDER, pages, timeout_seconds)

    def receive(self, pages: Sequence[int], timeout_seconds: float) -> int:
        """Receive pages, message by message."""
        return self._move(Side.RECEIVER, pages, timeout_seconds)

    def abort(self) -> None:
        """End the channel. A call that waits sees it at once; what takes time is a thread's."""
        if self._link.give_up():
            threading.Thread(target=self._finish, name="kv abort", daemon=True).start()

    def _move(self, side: Side, pages: Sequence[int], timeout_seconds: float) -> int:
        deadline = time.monotonic() + timeout_seconds
        watch = threading.Timer(timeout_seconds + _STUCK_SECONDS, self.abort)
        watch.daemon = True
        watch.start()
        lane: Lane | None = None
        try:
            with self._in_use, self._lanes.on_device():
                try:
                    index = self._rows.index(pages)
                    self._link.stop_if_given_up()
                    lane = self._lanes.take(side, deadline, self._link.stop_if_given_up)
                    self._run(lane, side, index, deadline)
                except BaseException:
                    self._end(lane, side)
                    raise
                self._lanes.give_back(lane, side)
        finally:
            watch.cancel()
        return self._rows.num_layers * len(pages) * self._rows.page_bytes

    def _run(self, lane: Lane, side: Side, index: Tensor, deadline: float) -> None:
        """One transfer; all that it had the device do is done when this returns."""
        move: _MoveChunk = self._send_chunk if side is Side.SENDER else self._receive_chunk
        lane.take_index(index)
        chunks = chunks_of(self._rows.num_layers, len(index), self._lanes.slot_pages)
        free: list[Mark | None] = [None] * NUM_SLOTS
        for number, chunk in enumerate(chunks):
            slot = number % NUM_SLOTS
            free[slot] = move(lane, slot, chunk, free[slot], deadline)
        for end in lane.ends():
            self._link.wait(end.is_done, deadline)

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
        is_mine = self._in_use.acquire(timeout=_STUCK_SECONDS)
        with self._reported_if_late():
            self._link.end()  # a call that is stuck in NCCL is woken by this alone
        if is_mine:
            self._in_use.release()

    def _end(self, lane: Lane | None, side: Side) -> None:
        """End the communicator, and wait until the device has let go of pages and staging."""
        failure: RuntimeError | None = None
        with self._reported_if_late():
            self._link.end()
            try:
                if lane is not None:
                    _wait_for_device(lane.ends())
            except RuntimeError as error:  # a device that has failed for good
                failure = error
        if lane is not None and failure is None:
            self._lanes.give_back(lane, side)
        elif lane is not None:
            self._note(self, f"the GPU failed in a KV transfer: {failure}")
            self._lanes.lose(lane)

    @contextmanager
    def _reported_if_late(self) -> Iterator[None]:
        """Tell the worker while an end does not come: NCCL's abort, too, waits for the device."""
        reported = threading.Event()

        def report() -> None:
            reported.set()
            self._note(self, "the GPU does not end a KV transfer that was aborted")

        late = threading.Timer(_LET_GO_SECONDS, report)
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()
            late.join()
            if reported.is_set():
                self._note(self, None)


def _wait_for_device(ends: tuple[Mark, ...]) -> None:
    while not all(end.is_done() for end in ends):
        time.sleep(_LOOK_SECONDS)
