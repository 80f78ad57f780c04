"""Attention of decode blocks by a kernel of our own: which tilings are worth trying, and its call.

Decides how queries and keys may be cut up for a batch of one shape, from its sizes and the
device's; which cut is the fastest is measured (``graphs.choice``). The kernel is
``blocks_triton``'s, or a fake's. Made by ``flashinfer_backend`` for graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sangam_worker.attention.layout import AttentionLayout
from sangam_worker.attention.protocol import FixedBatch
from sangam_worker.kv_pool import KVPool

_SPLITS = (1, 2, 4, 8)
"""More parts than that cost more to put together than they gain."""

_TILES_A_PROCESSOR = 4
"""From so many on a multiprocessor on keys are not split. It has two at a time, one of which
multiplies while the other waits; of a third, say, half of the device would have none."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a batch is cut up.

    Attributes:
        num_queries: of a tile, rows times heads that share K and V. num_keys: that are multiplied
            at a time. num_warps, num_stages: Triton's.
        num_splits: parts of the keys, each of them a tile's.
    """

    num_queries: int
    num_keys: int
    num_warps: int
    num_stages: int
    num_splits: int = 1

    def __str__(self) -> str:
        return f"blocks {self.num_queries}x{self.num_keys}/{self.num_splits}"


_NARROW = (Tiling(32, 64, 4, 4), Tiling(64, 64, 4, 3))
"""Up to 32 queries: as many as there are, or filled up to what Hopper's wider instructions take."""

_WIDE = (Tiling(64, 64, 4, 3), Tiling(128, 64, 8, 3))
"""Two tiles take an H200's multiprocessor, or one of 128 queries. (Compiled for sm_90 and heads of
128: 109 to 129 KiB of shared memory out of 228, 140 to 182 registers, and none of them spilled.)"""

AttendBlocks = Callable[[Tensor, Tensor, FixedBatch, Tiling, Tensor, Tensor], None]
"""See ``blocks_triton.attend_blocks``."""


def can_attend(head_dim: int) -> bool:
    """Whether the kernel has heads of this size."""
    return 16 <= head_dim <= 128 and head_dim & (head_dim - 1) == 0


def num_query_tiles(group: int, rows: int, tiling: Tiling) -> int:
    """Tiles of a sequence's queries on one head of K and V, which ``group`` heads share."""
    return -(-group * rows // tiling.num_queries)


def tilings(
    num_sequences: int, rows: int, num_heads: int, num_kv_heads: int, num_processors: int
) -> Sequence[Tiling]:
    """Those worth trying: keys are split by 2, 4, 8 while tiles are too few for the device."""
    group = num_heads // num_kv_heads
    enough = _TILES_A_PROCESSOR * num_processors
    chosen = []
    for tiling in _NARROW if group * rows <= _NARROW[0].num_queries else _WIDE:
        tiles = num_sequences * num_kv_heads * num_query_tiles(group, rows, tiling)
        # Half as many parts were too few; without parts it is tried in any case.
        useful = (each for each in _SPLITS if each == 1 or tiles * each // 2 < enough)
        chosen += [replace(tiling, num_splits=each) for each in useful]
    return chosen


def partial_shapes(
    num_rows: int, num_heads: int, head_dim: int, tiling: Tiling
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the parts' answers and the logarithms of their sums, in float32; empty without parts."""
    num_splits = tiling.num_splits if tiling.num_splits > 1 else 0
    return (num_splits, num_rows, num_heads, head_dim), (num_splits, num_rows, num_heads)


class BlockKernel:
    """The kernel as ``FixedAttention`` calls it.

    Args:
        workspace: uint8, of at least what ``partial_shapes`` take.
    """

    def __init__(
        self,
        pool: KVPool,
        batch: FixedBatch,
        tiling: Tiling,
        workspace: Tensor,
        attend_blocks: AttendBlocks,
    ) -> None:
        self._pool, self._batch, self._tiling = pool, batch, tiling
        self._workspace, self._attend_blocks = workspace, attend_blocks

    def plan(self, layout: AttentionLayout) -> None:
        """There is none: the layout's lengths and pages are on the device (``FixedBatch``)."""

    def attend(self, q: Tensor, layer: int, answers: Tensor) -> None:
        """Write the answers of a batch's rows, ``[rows, heads, kernel_dim]``."""
        pages = self._pool.layers_and_scratch[layer]
        self._attend_blocks(q, pages, self._batch, self._tiling, self._workspace, answers)
