"""Plain torch attention: one call per sequence, so that no sequence's result depends on another.

The backend of CPUs, and the one that tests trust. Called by ``transformer`` through the protocol.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sangam_core.errors import ConfigurationError
from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.layout import AttentionLayout
from sangam_worker.attention.protocol import FixedBatch
from sangam_worker.kv_pool import KVPool


class TorchAttention:
    """``Attention`` over a ``KVPool`` with ``scaled_dot_product_attention``."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._layout: AttentionLayout | None = None
        half_page = PAGE_TOKENS * pool.page_shape[2] * pool.page_shape[3]
        self._rows_of = [layer.view(-1, *pool.page_shape[2:]) for layer in pool.layers_and_scratch]
        self._halves_of = [layer.view(-1, half_page) for layer in pool.layers_and_scratch]

    def plan(self, layout: AttentionLayout) -> None:
        """Take the index arrays of the next iteration."""
        self._layout = layout
        device = self._pool.device
        self._write_rows = torch.from_numpy(layout.write_rows).to(device)
        self._num_written = len(layout.write_rows)
        self._writes_all = self._num_written == layout.qo_indptr[-1]
        # A layer seen as half pages: K of page p is number 2p, V is 2p + 1.
        pages, slots = np.divmod(layout.write_slots, PAGE_TOKENS)
        key_slots = 2 * pages * PAGE_TOKENS + slots
        self._key_slots = torch.from_numpy(key_slots).to(device)
        self._value_slots = torch.from_numpy(key_slots + PAGE_TOKENS).to(device)
        halves = 2 * layout.kv_page_indices.astype(np.int64)
        self._halves = torch.from_numpy(np.concatenate((halves, halves + 1))).to(device)
        self._row_bounds = layout.qo_indptr.tolist()
        self._head_bounds = layout.head_indptr.tolist()
        self._page_bounds = layout.kv_page_indptr.tolist()
        self._kv_lengths = layout.kv_lengths.tolist()
        self._is_ragged = layout.is_ragged.tolist()
        self._has_ragged, self._has_cached = any(self._is_ragged), not all(self._is_ragged)

    def write(self, k_new: Tensor, v_new: Tensor, layer: int) -> None:
        """Keep the K/V of the rows that the layout says."""
        if not self._num_written:
            return
        flat = self._rows_of[layer]
        if not self._writes_all:
            k_new, v_new = k_new[self._write_rows], v_new[self._write_rows]
        elif len(k_new) > self._num_written:
            k_new, v_new = k_new[: self._num_written], v_new[: self._num_written]
        flat.index_copy_(0, self._key_slots, k_new)
        flat.index_copy_(0, self._value_slots, v_new)

    def run(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, layer: int, *, head_rows_only: bool = False
    ) -> Tensor:
        """Keep the new K/V on their pages, then attend, sequence by sequence."""
        assert self._layout is not None, "plan first"
        self.write(k_new, v_new, layer)
        group = q.shape[1] // k_new.shape[1]
        queries = _by_head(q, group)
        sides: dict[bool, tuple[Tensor, Tensor]] = {}
        if self._has_ragged:
            sides[True] = _by_kv_head(k_new, group), _by_kv_head(v_new, group)
        if self._has_cached:
            sides[False] = self._cached(layer, group)
        bounds = self._head_bounds if head_rows_only else self._row_bounds
        parts = []
        for index, is_ragged in enumerate(self._is_ragged):
            start, stop = bounds[index], bounds[index + 1]
            if start == stop:
                continue
            if is_ragged:
                first, last = self._row_bounds[index], self._row_bounds[index + 1]
            else:
                first = self._page_bounds[index] * PAGE_TOKENS
                last = first + self._kv_lengths[index]
            k, v = (side[:, :, first:last] for side in sides[is_ragged])
            mixed = F.scaled_dot_product_attention(queries[:, :, start:stop], k, v)
            parts.append(mixed.permute(2, 1, 0, 3).reshape(stop - start, -1))
        if bounds[-1] < len(q):
            parts.append(q.new_zeros(len(q) - bounds[-1], q.shape[1] * q.shape[2]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def fixed_kernels(self, batch: FixedBatch) -> Sequence[str]:
        """One, on a CPU."""
        if self._pool.device.type == "cuda":
            raise ConfigurationError(
                "attention 'torch' loops over sequences on the host, so no CUDA graph can hold it: "
                "use attention 'flashinfer', or no graphs"
            )
        return ("torch",)

    def fixed(self, batch: FixedBatch, kernel: str) -> "TorchAttention":
        """The same again: what is run on a CPU reads the plan whenever it runs."""
        return TorchAttention(self._pool)

    def _cached(self, layer: int, group: int) -> tuple[Tensor, Tensor]:
        """K and V of every page in the plan, ``[group, kv_heads, pages * 16, head_dim]`` each."""
        gathered = self._halves_of[layer].index_select(0, self._halves)
        keys, values = gathered.view(2, -1, *self._pool.page_shape[2:]).unbind(0)
        return _by_kv_head(keys, group), _by_kv_head(values, group)


def _by_head(q: Tensor, group: int) -> Tensor:
    """``[rows, heads, d]`` as ``[group, kv_heads, rows, d]``, without a copy.

    Query heads that share a K/V head are a batch of their own: there is no mask to tell them apart.
    """
    num_rows, num_heads, head_dim = q.shape
    return q.view(num_rows, num_heads // group, group, head_dim).permute(2, 1, 0, 3)


def _by_kv_head(side: Tensor, group: int) -> Tensor:
    """``[positions, kv_heads, d]`` as ``[group, kv_heads, positions, d]``, without a copy."""
    return side.transpose(0, 1).expand(group, -1, -1, -1)
