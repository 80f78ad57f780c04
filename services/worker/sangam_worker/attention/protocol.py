"""What the transformer asks of an attention backend.

``plan`` once per iteration, ``run`` once per layer. A backend owns no memory of its own beyond
its plan; pages are the pool's. Tests hold every backend against dense attention.
"""

from typing import Protocol

from torch import Tensor

from sangam_worker.attention.layout import AttentionLayout


class Attention(Protocol):
    """Bidirectional attention (no mask, scale 1/sqrt(head_dim)) over pages and packed rows."""

    def plan(self, layout: AttentionLayout) -> None:
        """Take the index arrays of the next iteration."""
        ...

    def write(self, k_new: Tensor, v_new: Tensor, layer: int) -> None:
        """Keep the K/V of the rows that the layout says, without attending (see ``run``)."""
        ...

    def run(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, layer: int, *, head_rows_only: bool = False
    ) -> Tensor:
        """Keep the new K/V on their pages, then attend.

        Args:
            q: ``[rows, heads, head_dim]`` after RoPE, padding rows included. With
                ``head_rows_only`` the rows of ``layout.head_indptr`` (the last layer).
            k_new: ``[rows, kv_heads, head_dim]`` after RoPE. v_new: alike.
            layer: which pool.

        Returns:
            ``[rows of q, heads * head_dim]``; padding rows are zeros.
        """
        ...
