"""KV transport over NCCL, for GPUs: a communicator of two ranks for each pair, made on first use.

Decides how two ends meet: by an offer of NCCL's unique id and of what both must do alike. What then
moves, and how it ends, is ``nccl_channel``'s.
"""

import re
import threading
import time
from functools import partial

import structlog

from sangam_core.errors import TransferError
from sangam_worker.transfer.chunks import chunks_of
from sangam_worker.transfer.lanes import Lanes, SideStreams
from sangam_worker.transfer.layer_rows import LayeredPool, LayerRows
from sangam_worker.transfer.memory import SLOT_BYTES, TRANSFERS_EACH_WAY
from sangam_worker.transfer.nccl_channel import NcclChannel
from sangam_worker.transfer.nccl_library import UNIQUE_ID_BYTES, Nccl
from sangam_worker.transfer.nccl_link import NOT_NCCLS, open_link
from sangam_worker.transfer.protocol import KVChannel, Side

log = structlog.get_logger(__name__)

_RANKS = {Side.RECEIVER: 0, Side.SENDER: 1}

_LOOK_SECONDS = 0.001

_WARM_UP_SECONDS = 60.0

_WARM_UP_PAGES = (1, 64)
"""Torch has a kernel for few rows and one for many; each is loaded when it first runs."""

_OFFER = re.compile(rf"(\d{{1,9}}):(\d{{1,2}}):([0-9a-f]{{{2 * UNIQUE_ID_BYTES}}})")


class NcclTransport:
    """Channels from and to one pool.

    Args:
        library: what ``load_nccl`` returns.
        streams: the pool's device.
        max_ctas: thread blocks that a send or receive may occupy.
        slot_bytes: staging memory of a transfer is two slots of this.
        transfers_each_way: so many may be sent at once, and as many received.
        pairs_each_way: so many may be open to send on, and as many to receive on.
    """

    name = "nccl"

    def __init__(
        self,
        pool: LayeredPool,
        library: Nccl,
        streams: SideStreams,
        *,
        max_ctas: int,
        pairs_each_way: int,
        slot_bytes: int = SLOT_BYTES,
        transfers_each_way: int = TRANSFERS_EACH_WAY,
    ) -> None:
        self.pairs_each_way = pairs_each_way
        self._library = library
        self._streams = streams
        self._max_ctas = max_ctas
        self._rows = LayerRows(pool)
        self._lanes = Lanes(streams, self._rows, slot_bytes, transfers_each_way)
        self._ailments: dict[int, str] = {}

    @property
    def staging_bytes(self) -> int:
        """Device memory that transfers stage in, kept for the next; NCCL's own goes by pairs."""
        return self._lanes.num_bytes

    @property
    def transfers_each_way(self) -> int:
        """As many as there are lanes."""
        return self._lanes.each_way

    def warm_up(self) -> None:
        """Make the device load the copies' kernels, which might wait for a receive that runs.

        Raises:
            TransferError: the device does not do them.
        """
        deadline = time.monotonic() + _WARM_UP_SECONDS
        with self._lanes.on_device():
            lane = self._lanes.take(Side.RECEIVER, deadline, lambda: None)
            for wanted_pages in _WARM_UP_PAGES:
                num_pages = min(wanted_pages, self._lanes.slot_pages, self._rows.total_pages)
                lane.take_index(self._rows.index(range(num_pages)))
                chunk = chunks_of(1, num_pages, num_pages)[0]
                for copy in (self._rows.gather, self._rows.scatter):
                    lane.copies.launch(partial(copy, chunk, lane.index, lane.slots[0][:num_pages]))
            ends = lane.ends()
            while not all(end.is_done() for end in ends):
                if time.monotonic() > deadline:
                    raise TransferError("the GPU does not copy KV pages")
                time.sleep(_LOOK_SECONDS)
        self._lanes.give_back(lane, Side.RECEIVER)

    def offer(self) -> str:
        """A new unique id, and what both ends must do alike: message size and thread blocks."""
        try:
            unique_id = bytes(self._library.get_unique_id())
        except NOT_NCCLS:
            raise
        except Exception as error:
            raise TransferError(f"NCCL: {type(error).__name__}: {error}") from error
        return f"{self._lanes.slot_pages}:{self._max_ctas}:{unique_id.hex()}"

    def connect(
        self,
        side: Side,
        communicator: str,
        offer: str,
        timeout_seconds: float,
        given_up: threading.Event,
    ) -> KVChannel:
        """Meet the other side by the offer."""
        unique_id, max_ctas = self._terms(offer)
        rank = _RANKS[side]
        link = open_link(
            self._library,
            self._streams,
            num_ranks=2,
            rank=rank,
            unique_id=unique_id,
            max_ctas=max_ctas,
            deadline=time.monotonic() + timeout_seconds,
            given_up=given_up,
        )
        return NcclChannel(link, 1 - rank, self._rows, self._lanes, self._note)

    def ailment(self) -> str | None:
        """Whether the device still works on a transfer that was aborted."""
        return next(iter(tuple(self._ailments.values())), None)

    def close(self) -> None:
        """Free the staging memory that no transfer holds."""
        self._lanes.close()

    def _terms(self, offer: str) -> tuple[bytes, int]:
        """The unique id, and the receiver's number of thread blocks."""
        found = _OFFER.fullmatch(offer)
        if found is None:
            raise TransferError(f"offer {offer[:40]!r} is not PAGES:CTAS:UNIQUE_ID")
        slot_pages, max_ctas, digits = found.groups()
        if int(slot_pages) != self._lanes.slot_pages:
            raise TransferError(
                f"messages of {slot_pages} pages there, {self._lanes.slot_pages} here: the two "
                "workers are of different versions"
            )
        return bytes.fromhex(digits), int(max_ctas)

    def _note(self, channel: NcclChannel, ailment: str | None) -> None:
        if ailment is None:
            self._ailments.pop(id(channel), None)
        else:
            log.error("KV transfer holds on to the device", ailment=ailment)
            self._ailments[id(channel)] = ailment
