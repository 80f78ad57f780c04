"""No cache: every pass is a whole-sequence pass (naive full recomputation).

It holds no pages and every pass is admitted by the token budget as a prefill is, so that cached
requests beside it keep their decodes. Only a colocated worker runs it.
"""

from sangam_core.geometry import Geometry
from sangam_worker.strategies.protocol import Rows


class NoCache:
    """Nothing is kept between passes."""

    name = "none"
    keeps_kv = False
    steady_step = 0

    def rows(self, geometry: Geometry, block: int, step: int) -> Rows:
        """Every row, on every pass."""
        everything = range(geometry.total_tokens)
        return Rows(everything, everything, is_whole_sequence=True)
