"""Attention for batches of one shape, as a CUDA graph needs it: what its kernels have in common.

Decides that every row of such a batch is kept, and where answers lie: at one place for good, so
that what is captured finds them. What attends is one of FlashInfer's kernels (``flashinfer_fixed``)
or our own (``blocks``). Made by ``flashinfer_backend``, planned and run by ``graphs``.
"""

from typing import Protocol

import torch
from torch import Tensor

from sangam_worker.attention.flashinfer_pool import FlashInferPool
from sangam_worker.attention.layout import AttentionLayout
from sangam_worker.attention.protocol import FixedBatch, Places


class FixedKernel(Protocol):
    """What attends."""

    def plan(self, layout: AttentionLayout) -> None:
        """Take the index arrays of the next iteration, see ``FixedAttention.plan``."""
        ...

    def attend(self, q: Tensor, layer: int, answers: Tensor) -> None:
        """Rows, ``[rows, heads, head_dim]``, to a layer's pages, on which their K and V are.

        Args:
            answers: ``[rows, heads, kernel_dim]``, written over but for rows that fill up.
        """
        ...


class FixedAttention:
    """``Attention`` for one ``FixedBatch``: every sequence over pages, every row kept.

    Args:
        results: ``[at least the batch's rows, heads, kernel_dim]``, finite numbers. Rows that fill
            up the batch are not computed: they keep what is there.
    """

    def __init__(
        self, pages: FlashInferPool, batch: FixedBatch, results: Tensor, kernel: FixedKernel
    ) -> None:
        self._pages, self._batch, self._kernel = pages, batch, kernel
        self._num_queries = batch.num_sequences * batch.rows_per_sequence
        self._results = results[: len(batch.write_slots)]
        self._write_sequences = torch.zeros_like(batch.write_slots)

    def plan(self, layout: AttentionLayout) -> None:
        """Take the index arrays of the next iteration. The first ones are of a full batch.

        What ``FixedBatch`` has on the device is there already; the layout's arrays are in pinned
        memory that stays as it is until the device has copied it.
        """
        self._kernel.plan(layout)

    def write(self, k_new: Tensor, v_new: Tensor, layer: int) -> None:
        """Keep the K/V of every row; of those that fill up the batch on the scratch page."""
        self._pages.append(k_new, v_new, layer, self._write_sequences, self._batch.write_slots)

    def run(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, layer: int, *, head_rows_only: bool = False
    ) -> Tensor:
        """Keep the new K/V on their pages, then attend. There is no plan for some rows only."""
        assert not head_rows_only, "every row of a fixed batch is a head row"
        self.write(k_new, v_new, layer)
        return self.attend(q, layer)

    def places(self) -> Places | None:
        """See ``KeepsRows``; those of rows that fill up the batch are on the scratch page."""
        if self._pages.is_narrow:
            return None
        return Places(self._pages.pool.layers_and_scratch, self._batch.write_slots)

    def attend(self, q: Tensor, layer: int) -> Tensor:
        """See ``KeepsRows``."""
        self._kernel.attend(q[: self._num_queries], layer, self._results[: self._num_queries])
        return self._results[:, :, : self._pages.head_dim].flatten(1)
