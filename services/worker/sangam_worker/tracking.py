"""What the GPU thread knows of a block besides the scheduler's state: times, pins, deadlines.

Plain records and the heap of deadlines; used by ``books``, made by ``loop``. No clock of its own.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from sangam_core.wire import BlockKey, HeldBlock, LossReason
from sangam_worker.block_state import BlockState


@dataclass(frozen=True, slots=True)
class Moved:
    """A transfer that ended well."""

    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """The scheduler between two iterations, for heartbeats and probes."""

    free_pages: int
    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    carried_tokens: int = 0


@dataclass(slots=True, eq=False)
class TrackedBlock:
    """A block on this worker.

    Attributes:
        since_seconds: when it was submitted or its KV arrived; then when its last pass ended.
        is_transferred: whether its prefill ran elsewhere.
        reserve_seconds: how long it waited for its pages, where its KV comes from elsewhere.
        is_pinned: whether a transfer reads or fills its pages, which stay its own until that ends.
        doom: why it is dropped as soon as it is not pinned any more.
    """

    state: BlockState
    since_seconds: float
    expires_at: float
    is_transferred: bool
    reserve_seconds: float = 0.0
    is_pinned: bool = False
    doom: LossReason | None = None

    def held(self) -> HeldBlock:
        """The block as routers see it."""
        state = self.state
        has_prefill_ahead = not self.is_transferred and state.num_passes_here == 0
        return HeldBlock(
            key=state.key,
            stage=state.stage.value,
            num_pages=len(state.pages),
            needed_pages=state.num_pages,
            prefill_tokens=state.geometry.total_tokens if has_prefill_ahead else 0,
        )


class Expiries:
    """Deadlines by time. Entries of blocks that are gone are skipped, and cleared out in time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, int, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, tracked: TrackedBlock, everything: Iterable[TrackedBlock], num_live: int) -> None:
        """Note a block's deadline; ``everything`` are the live blocks, this one included."""
        if len(self._heap) > 2 * num_live + 64:
            # Blocks end long before their deadlines: without this their entries pile up.
            self._heap = [_entry(each) for each in everything]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, _entry(tracked))

    def seconds_left(self, now_seconds: float) -> float | None:
        """Until the next deadline, ``None`` without any."""
        return max(0.0, self._heap[0][0] - now_seconds) if self._heap else None

    def pop_expired(self, now_seconds: float) -> list[BlockKey]:
        """Take out the keys whose time has come."""
        expired = []
        while self._heap and self._heap[0][0] <= now_seconds:
            _, request_id, block, attempt = heapq.heappop(self._heap)
            expired.append(BlockKey(request_id=request_id, block=block, attempt=attempt))
        return expired


def _entry(tracked: TrackedBlock) -> tuple[float, str, int, int]:
    key = tracked.state.key
    return tracked.expires_at, key.request_id, key.block, key.attempt
