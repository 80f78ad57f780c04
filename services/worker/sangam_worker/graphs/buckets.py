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

_STEP_BLOCKS = 8


def buckets_up_to(most_blocks: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24 ... up to ``most_blocks`` (itself included), at most ``MOST_BLOCKS``.

    Few blocks are cheap to fill up; from 8 on a step of 8 wastes no more than half, and less of
    more.
    """
    most_blocks = min(most_blocks, MOST_BLOCKS)
    usual = (1, 2, 4, *range(_STEP_BLOCKS, most_blocks, _STEP_BLOCKS))
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
