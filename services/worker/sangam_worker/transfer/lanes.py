"""What a channel moves KV on: two side streams and two staging slots, borrowed from a free list.

While one slot is on the wire the other is filled or emptied; the streams order that, no thread
waits for it. Decides how much memory a channel may hold, and that nobody gets a lane on which the
device is still busy. Called by ``nccl``; ``cuda_streams`` is the device, tests have their own.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from sangam_worker.transfer.layer_rows import WORD, LayerRows
from sangam_worker.transfer.memory import NUM_SLOTS


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
    """Streams and staging of one channel.

    Attributes:
        copies: gathers and scatters. wire: sends and receives.
        slots: ``[pages, page_words]`` each. index: page numbers of the transfer under way.
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
    """All lanes of a transport. Safe from any thread."""

    def __init__(self, streams: SideStreams, rows: LayerRows, slot_bytes: int) -> None:
        self.slot_pages = max(1, slot_bytes // rows.page_bytes)
        self._streams = streams
        self._rows = rows
        self._allocated_pages = min(self.slot_pages, rows.num_layers * rows.total_pages)
        self._lock = threading.Lock()
        self._free: list[Lane] = []
        self._lost: list[Lane] = []
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Device memory of all lanes, borrowed or free."""
        return self._num_bytes

    def take(self) -> Lane:
        """A lane; a new one where none is free. ``RuntimeError`` when memory is short."""
        with self._lock:
            if self._free:
                return self._free.pop()
            lane = Lane(self._streams, self._allocated_pages, self._rows)
            self._num_bytes += lane.num_bytes
            return lane

    def give_back(self, lane: Lane) -> None:
        """Return a lane on which everything is done."""
        with self._lock:
            self._free.append(lane)

    def lose(self, lane: Lane) -> None:
        """Keep a lane from being used, or its memory freed: the device has not let go of it."""
        with self._lock:
            self._lost.append(lane)

    def close(self) -> None:
        """Free the lanes that nobody has borrowed."""
        with self._lock:
            self._num_bytes -= sum(lane.num_bytes for lane in self._free)
            self._free.clear()


def _copy(index: Tensor, target: Tensor) -> None:
    target[: len(index)].copy_(index, non_blocking=True)
