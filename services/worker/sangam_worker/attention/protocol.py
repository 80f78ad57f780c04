"""What the transformer asks of an attention backend.

``plan`` once per iteration, ``run`` once per layer. A backend owns no memory of its own beyond
its plan; pages are the pool's. Tests hold every backend against dense attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where an iteration's K and V go, for whoever writes them himself.

    Attributes:
        layers: pages of each layer, ``(pages, 2, 16, kv_heads, head_dim)``.
        slots: ``page * 16 + slot``, int32 on the device, of each row but the padding.
    """

    layers: Sequence[Tensor]
    slots: Tensor


@runtime_checkable
class KeepsRows(Attention, Protocol):
    """Attention whose K and V may be on their pages before it runs."""

    def places(self) -> Places | None:
        """Of the iteration that is planned; ``None`` where only ``run`` can keep its rows."""
        ...

    def attend(self, q: Tensor, layer: int) -> Tensor:
        """As ``run``, where every row's K and V are in their places."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FixedBatch:
    """The shape of a batch that is the same every time, and where its index arrays lie.

    Attributes:
        num_sequences: that are fed; those that only fill up the batch have no queries.
        rows_per_sequence: as many of every one.
        full: the layout of a batch that nothing fills up.
        write_slots: int32 ``[rows]`` on the device, all of the rows' (``AttentionLayout``).
        kv_lengths, page_indptr: int32 ``[num_sequences]`` and one more, on the device: as of a
            layout. Sequences that only fill up the batch have length 0.
        page_indices: int32 on the device, as many as a batch can name; the first ones count.
    """

    num_sequences: int
    rows_per_sequence: int
    full: AttentionLayout
    write_slots: Tensor
    kv_lengths: Tensor
    page_indptr: Tensor
    page_indices: Tensor


@runtime_checkable
class AttentionBackend(Attention, Protocol):
    """Attention that can be captured."""

    def fixed_kernels(self, batch: FixedBatch) -> Sequence[str]:
        """Names of what may attend in batches of one shape; the first one where nothing is known.

        Raises:
            ConfigurationError: there is no such thing on the device.
        """
        ...

    def fixed(self, batch: FixedBatch, kernel: str) -> Attention:
        """Attention for batches of one shape by one of ``fixed_kernels``, with a plan of its own.

        Its kernels find everything that changes from plan to plan at the same place on the device.
        """
        ...
