"""NCCL to oneself: pages of a pool copied to other pages of it by a communicator of one rank.

What a single GPU can try of the transport (NCCL refuses two ranks on one): the same link, lanes,
messages and copies, with a send and a receive of each message in one group. Called by
``transport`` and by the tests on GPUs; no worker uses it.
"""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from torch import Tensor

from sangam_worker.transfer.chunks import Chunk, chunks_of, pages_in
from sangam_worker.transfer.lanes import Lane, Lanes, Mark, SideStreams
from sangam_worker.transfer.layer_rows import LayeredPool, LayerRows
from sangam_worker.transfer.memory import NUM_SLOTS, SLOT_BYTES
from sangam_worker.transfer.nccl_library import Communicator, Nccl
from sangam_worker.transfer.nccl_link import open_link
from sangam_worker.transfer.protocol import Side

_CONNECT_SECONDS = 30.0
_SELF = 0


class NcclLoop:
    """A pool's loop; a context that ends it.

    Args:
        as for ``NcclTransport``.

    Raises:
        TransferError: NCCL does not make the communicator.
    """

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
        self._rows = LayerRows(pool)
        self._lanes = Lanes(streams, self._rows, slot_bytes)
        self._link = open_link(
            library,
            streams,
            num_ranks=1,
            rank=_SELF,
            unique_id=bytes(library.get_unique_id()),
            max_ctas=max_ctas,
            deadline=time.monotonic() + _CONNECT_SECONDS,
        )
        self._out, self._in = (
            self._lanes.take(side, time.monotonic(), self._link.stop_if_given_up)
            for side in (Side.SENDER, Side.RECEIVER)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._link.end()

    def copy(self, sources: Sequence[int], targets: Sequence[int], timeout_seconds: float) -> int:
        """Copy pages of every layer onto as many others; returns bytes. Raises as channels do."""
        deadline = time.monotonic() + timeout_seconds
        with self._lanes.on_device():
            self._out.take_index(self._rows.index(sources))
            self._in.take_index(self._rows.index(targets))
            free: list[tuple[Mark, Mark] | None] = [None] * NUM_SLOTS
            chunks = chunks_of(self._rows.num_layers, len(sources), self._lanes.slot_pages)
            for number, chunk in enumerate(chunks):
                slot = number % NUM_SLOTS
                free[slot] = self._copy_chunk(slot, chunk, free[slot], deadline)
            for lane in (self._out, self._in):
                for end in lane.ends():
                    self._link.wait(end.is_done, deadline)
        return self._rows.num_layers * len(sources) * self._rows.page_bytes

    def _copy_chunk(
        self, slot: int, chunk: Chunk, free: tuple[Mark, Mark] | None, deadline: float
    ) -> tuple[Mark, Mark]:
        sent, received = self._staged(self._out, slot, chunk), self._staged(self._in, slot, chunk)
        wire = self._out.wire
        if free is not None:
            self._out.copies.wait(free[0])
            wire.wait(free[1])
        self._out.copies.launch(lambda: self._rows.gather(chunk, self._out.index, sent))
        wire.wait(self._out.copies.mark())

        def send_to_self(each: Communicator) -> None:
            with self._library.group():
                each.send(sent, _SELF, stream=wire.handle)
                each.recv(received, _SELF, stream=wire.handle)

        self._link.call(send_to_self, deadline)
        moved = wire.mark()
        self._in.copies.wait(moved)
        self._in.copies.launch(lambda: self._rows.scatter(chunk, self._in.index, received))
        return moved, self._in.copies.mark()

    def _staged(self, lane: Lane, slot: int, chunk: Chunk) -> Tensor:
        return lane.slots[slot][: pages_in(chunk)]
