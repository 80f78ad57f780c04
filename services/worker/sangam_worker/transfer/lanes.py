"""What a transfer moves KV on: two side streams and two staging slots, lent while it is under way.

While one slot is on the wire the other is filled or emptied; the streams order that, no thread
waits for it. Decides how many transfers may be under way, which bounds what they stage in, and that
nobody gets a lane on which the device is still busy. Called by ``nccl_channel``; ``cuda_streams``
is the device, tests have their own.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from sangam_core.errors import TransferError
from sangam_worker.transfer.layer_rows import WORD, LayerRows
from sangam_worker.transfer.memory import NUM_SLOTS, TRANSFERS_EACH_WAY
from sangam_worker.transfer.protocol import Side

_LOOK_SECONDS = 0.05
"""How often a transfer that waits for a lane looks whether it has been aborted."""


class Mark(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """Whether the device has passed it. ``RuntimeError`` when the device has failed."""
        ...


class SideStream(Protocol):
    """Work that a device does in order, beside its other streams."""

    @property
    def handle(self) -> int:
        """What NCCL knows it by."""
        ...

    def launch(self, work: Callable[[], None]) -> None:
        """Queue kernels: those that ``work`` launches."""
        ...

    def mark(self) -> Mark:
        """The point after everything queued so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """Let what is queued from now on begin after a mark of another stream."""
        ...


class SideStreams(Protocol):
    """One device's streams."""

    def new(self) -> SideStream:
        """Another stream."""
        ...

    def empty(self, stream: SideStream, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory that ``stream`` may use at once, whatever the device is doing."""
        ...

    def entered(self) -> AbstractContextManager[None]:
        """Make the device the calling thread's."""
        ...


class Lane:
    """Streams and staging of one transfer.

    Attributes:
        copies: gathers and scatters. wire: sends and receives.
        slots: ``[pages, page_words]`` each. index: page numbers of the transfer.
    """

    def __init__(self, streams: SideStreams, slot_pages: int, rows: LayerRows) -> None:
        self.copies = streams.new()
        self.wire = streams.new()
        self.slots = tuple(
            streams.empty(self.copies, slot_pages, rows.page_words, dtype=WORD)
            for _ in range(NUM_SLOTS)
        )
        self.index = streams.empty(self.copies, rows.total_pages, dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        """Device memory."""
        return sum(each.nbytes for each in (*self.slots, self.index))

    def take_index(self, index: Tensor) -> None:
        """Send page numbers to the device: once a transfer, not once a layer."""
        self.copies.launch(lambda: _copy(index, self.index))

    def ends(self) -> tuple[Mark, Mark]:
        """The points after everything queued so far."""
        return self.copies.mark(), self.wire.mark()


class Lanes:
    """All lanes of a transport. Safe from any thread.

    A receiver should have its lane before it asks a sender for anything: whoever has a lane to send
    on then waits for nobody's, so that full workers cannot wait for each other in a circle.

    Args:
        each_way: how many may be lent to send on, and how many to receive on.
    """

    def __init__(
        self,
        streams: SideStreams,
        rows: LayerRows,
        slot_bytes: int,
        each_way: int = TRANSFERS_EACH_WAY,
    ) -> None:
        self.slot_pages = max(1, slot_bytes // rows.page_bytes)
        self.each_way = each_way
        self._streams = streams
        self._rows = rows
        self._allocated_pages = min(self.slot_pages, rows.num_layers * rows.total_pages)
        self._changed = threading.Condition()
        self._waiting: dict[Side, deque[object]] = {side: deque() for side in Side}
        self._num_lent = dict.fromkeys(Side, 0)
        self._free: list[Lane] = []
        self._lost: list[Lane] = []
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Device memory of all lanes, lent or free."""
        return self._num_bytes

    def on_device(self) -> AbstractContextManager[None]:
        """Make the device the calling thread's: NCCL and copies ask the thread which it is."""
        return self._streams.entered()

    def take(self, side: Side, deadline: float, check: Callable[[], None]) -> Lane:
        """A lane for one transfer, first come, first served; a new one where none is free.

        Args:
            deadline: on the monotonic clock.
            check: called now and then while others have all lanes; may raise. Must be quick.

        Raises:
            TransferError: no lane came free in time, or memory is short.
        """
        ticket, line = object(), self._waiting[side]
        with self._changed:
            line.append(ticket)
            try:
                while line[0] is not ticket or self._num_lent[side] >= self.each_way:
                    check()
                    if (left := deadline - time.monotonic()) <= 0:
                        raise TransferError(
                            f"{self.each_way} transfers are under way that have this worker as "
                            f"their {side}, and none ended before the deadline"
                        )
                    self._changed.wait(min(left, _LOOK_SECONDS))
                self._num_lent[side] += 1
            finally:
                line.remove(ticket)
                self._changed.notify_all()
            if self._free:
                return self._free.pop()
        return self._new(side)

    def give_back(self, lane: Lane, side: Side) -> None:
        """Return a lane on which everything is done."""
        with self._changed:
            self._free.append(lane)
            self._num_lent[side] -= 1
            self._changed.notify_all()

    def lose(self, lane: Lane) -> None:
        """Keep a lane from being lent, or its memory freed: the device will not let go of it."""
        with self._changed:
            self._lost.append(lane)

    def close(self) -> None:
        """Free the lanes that nobody has borrowed."""
        with self._changed:
            self._num_bytes -= sum(lane.num_bytes for lane in self._free)
            self._free.clear()

    def _new(self, side: Side) -> Lane:
        """Another lane. Without the lock, since the device may take its time over memory."""
        try:
            with self.on_device():
                lane = Lane(self._streams, self._allocated_pages, self._rows)
        except BaseException as error:
            with self._changed:
                self._num_lent[side] -= 1
                self._changed.notify_all()
            if isinstance(error, RuntimeError):
                raise TransferError(f"no memory to stage KV in: {error}") from error
            raise
        with self._changed:
            self._num_bytes += lane.num_bytes
        return lane


def _copy(index: Tensor, target: Tensor) -> None:
    target[: len(index)].copy_(index, non_blocking=True)
