"""Fast-dLLM's prefix cache: later passes run from the block's start to the sequence's end.

K/V before the block stay as of the prefill; those of the fed rows are rewritten by every pass
before they are read, which is the same as throwing them away (dllm-semantics section b).
"""

from sangam_core.geometry import Geometry
from sangam_worker.strategies.protocol import Rows


class PrefixCache:
    """Cached keys and values before the block."""

    name = "prefix"
    keeps_kv = True
    steady_step = 1

    def rows(self, geometry: Geometry, block: int, step: int) -> Rows:
        """Pass 0: every row. Later: block start to the end, seeing the whole sequence."""
        everything = range(geometry.total_tokens)
        if step == 0:
            return Rows(everything, everything, is_whole_sequence=True)
        tail = range(geometry.block_start(block), geometry.total_tokens)
        return Rows(tail, everything, is_whole_sequence=False)
