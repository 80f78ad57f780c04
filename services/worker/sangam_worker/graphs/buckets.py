"""Which iterations a graph can carry, and which graph carries them.

Pure. A graph is captured for a number of blocks, its bucket; fewer blocks are filled up to it.
Called by ``runner``, and by whoever decides at the start what is captured.
"""

from bisect import bisect_left
from collections.abc import Sequence

from sangam_worker.packing import is_contiguous
from sangam_worker.plan import Pass

BLOCK_TOKENS = 32
"""Length of the blocks that are captured: both models' default. Others run without a graph."""

MOST_BLOCKS = 64
"""Of the largest bucket. A pass of so many blocks takes the device several times as long as the
host takes to launch it, so that a graph gains nothing any more."""

_FEW_BLOCKS = (1, 2, 4, 6)
"""Up to 4 blocks the weights' bytes take the time, and rows that fill up cost next to nothing."""

_STEP_BLOCKS = 4


def buckets_up_to(most_blocks: int) -> tuple[int, ...]:
    """1, 2, 4, 6, 8, 12, 16, 20 ... up to ``most_blocks`` (itself included), at most
    ``MOST_BLOCKS``.

    From 8 blocks on a pass takes as long as it has rows, those that fill it up among them. Measured
    on an H200 (LLaDA-8B): 8 blocks 8.7 ms, 16 blocks 16.0, so that 9 in a graph of 16 would take
    longer than issued one by one. 4 blocks of 32 rows are a tile of the products: finer steps gain
    nothing, and each graph takes memory (``sizing``) and time at the start.
    """
    most_blocks = min(most_blocks, MOST_BLOCKS)
    usual = (*_FEW_BLOCKS, *range(2 * _STEP_BLOCKS, most_blocks, _STEP_BLOCKS))
    return (*(each for each in usual if each < most_blocks), most_blocks)


def bucket_of(num_blocks: int, ascending: Sequence[int]) -> int | None:
    """The smallest bucket that holds so many blocks; ``None`` where there is none."""
    index = bisect_left(ascending, num_blocks)
    return ascending[index] if index < len(ascending) else None


def is_capturable(passes: Sequence[Pass], block_tokens: int) -> bool:
    """Whether all passes are decodes of one block's length, over pages."""
    return all(_is_block_decode(item, block_tokens) for item in passes)


def _is_block_decode(item: Pass, block_tokens: int) -> bool:
    return (
        not item.is_whole_sequence
        and len(item.positions) == block_tokens
        and bool(item.pages)
        and is_contiguous(item.positions)
    )
