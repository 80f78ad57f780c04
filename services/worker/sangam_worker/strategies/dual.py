"""Fast-dLLM's dual cache: a prefill a block, then passes over the block's rows alone.

K/V before and behind the block stay as of the prefill; the block's own are overwritten by every
pass (dllm-semantics section b, *dual*).
"""

from sangam_core.geometry import Geometry
from sangam_worker.strategies.protocol import Rows


class DualCache:
    """Cached keys and values on both sides of the block."""

    name = "dual"
    keeps_kv = True
    steady_step = 1

    def rows(self, geometry: Geometry, block: int, step: int) -> Rows:
        """Pass 0: every row. Later: the block's rows, seeing the whole sequence."""
        everything = range(geometry.total_tokens)
        if step == 0:
            return Rows(everything, everything, is_whole_sequence=True)
        return Rows(geometry.block_range(block), everything, is_whole_sequence=False)
