"""Rotary position embedding in half-split layout, absolute positions from 0.

Called by ``transformer``. Rules of precision: ``dllm-semantics`` section a.
"""

import torch
from torch import Tensor

from sangam_worker.models.description import ModelConfig

FIRST_ROWS = 4096
"""Positions that are there from the start."""


class RotaryTable:
    """cos and sin by position, computed in float32, kept in ``dtype``; grows when needed."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
        self._inverse = 1.0 / (config.rope_theta ** (exponents / config.head_dim))
        self._dtype, self._device = dtype, device
        self._fill(FIRST_ROWS)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos ``[rows, 1, head_dim]`` and sin ``[rows, 1, head_dim / 2]`` of positions."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    @property
    def num_positions(self) -> int:
        """Positions from 0 that are there."""
        return len(self._cos)

    def halves(self) -> Tensor:
        """A float32 copy of the table, cos then sin of each half: ``[positions, head_dim]``."""
        sin = self._sin[:, 0]
        return torch.cat((self._cos[:, 0, : sin.shape[1]], sin), -1).float()

    def reserve(self, num_positions: int) -> None:
        """Make sure that positions below ``num_positions`` are there."""
        if num_positions > len(self._cos):
            self._fill(max(num_positions, 2 * len(self._cos)))

    def _fill(self, num_positions: int) -> None:
        # A multiple of 16 rows, so that no row falls to an element-wise kernel's scalar tail.
        rows = -(-num_positions // 16) * 16
        angles = torch.arange(rows, dtype=torch.float32)[:, None] * self._inverse
        cos = angles.cos().to(self._dtype).to(self._device)
        self._cos = torch.cat((cos, cos), -1)[:, None]
        self._sin = angles.sin().to(self._dtype).to(self._device)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[rows, heads, head_dim]`` in the table's dtype; the result is in x's.

    Products and sums round one by one, as the published code's do.
    """
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, -1)
    turned = wide * cos
    turned_first, turned_second = turned.chunk(2, -1)
    turned_first -= second * sin
    turned_second += first * sin
    return turned.to(x.dtype)
