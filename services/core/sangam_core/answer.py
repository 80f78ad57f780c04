"""When a block and an answer are complete, read off the token ids alone.

The scheduler, a worker's or the simulator's, asks after each pass; events carry the answer to the
router. Stop strings are the router's business: they need text.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum


class Completion(StrEnum):
    """What a pass has completed."""

    NOTHING = "nothing"
    BLOCK = "block"
    ANSWER = "answer"


def completion(
    ids: Sequence[int], block: range, mask_id: int, eos_ids: Collection[int]
) -> Completion:
    """What is complete after a pass over ``block``, all earlier blocks being complete.

    An answer ends at an EOS that has no mask before it, mid-block too (design section 3, *EOS*).
    ``eos_ids`` is empty when EOS is ignored.
    """
    tokens = ids[block.start : block.stop]
    is_masked = mask_id in tokens
    settled = tokens[: tokens.index(mask_id)] if is_masked else tokens
    if not frozenset(eos_ids).isdisjoint(settled):
        return Completion.ANSWER
    return Completion.NOTHING if is_masked else Completion.BLOCK
