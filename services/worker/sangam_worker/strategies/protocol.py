"""The protocol of a caching strategy: which rows a pass feeds, which cached rows it sees.

Pure geometry. The scheduler derives costs and stages from it, the engine its index tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sangam_core.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one pass.

    Attributes:
        fed: absolute positions, ascending, whose tokens go through the model. Where the strategy
            keeps KV, their K/V are written to the cache.
        sees: positions whose K/V the fed rows attend to: cached ones, overlaid by the fed ones.
        is_whole_sequence: an indivisible pass that the token budget admits like a prefill;
            otherwise the pass is a decode.
    """

    fed: Sequence[int]
    sees: range
    is_whole_sequence: bool


class CachingStrategy(Protocol):
    """How the passes of a block use the KV cache."""

    @property
    def name(self) -> str:
        """The name in settings and requests."""
        ...

    @property
    def keeps_kv(self) -> bool:
        """Whether a block holds pages between its passes (else it can only run colocated)."""
        ...

    @property
    def steady_step(self) -> int:
        """The number of the pass from which on all passes of a block have the same rows."""
        ...

    def rows(self, geometry: Geometry, block: int, step: int) -> Rows:
        """Rows of pass number ``step`` (0 is the prefill) of a block."""
        ...
