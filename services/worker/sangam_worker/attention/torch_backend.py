"""Plain torch attention: one call per sequence, so that no sequence's result depends on another.

The backend of CPUs, and the one that tests trust. Called by ``transformer`` through the protocol.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.layout import AttentionLayout
from sangam_worker.kv_pool import KVPool


class TorchAttention:
    """``Attention`` over a ``KVPool`` with ``scaled_dot_product_attention``."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._layout: AttentionLayout | None = None

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

    def write(self, k_new: Tensor, v_new: Tensor, layer: int) -> None:
        """Keep the K/V of the rows that the layout says."""
        if not self._num_written:
            return
        flat = self._pool.layers[layer].view(-1, *k_new.shape[1:])
        if self._writes_all:
            k_new, v_new = k_new[: self._num_written], v_new[: self._num_written]
        else:
            k_new, v_new = k_new[self._write_rows], v_new[self._write_rows]
        flat.index_copy_(0, self._key_slots, k_new)
        flat.index_copy_(0, self._value_slots, v_new)

    def run(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, layer: int, *, head_rows_only: bool = False
    ) -> Tensor:
        """Keep the new K/V on their pages, then attend, sequence by sequence."""
        assert self._layout is not None, "plan first"
        self.write(k_new, v_new, layer)
        keys, values = self._cached(layer)
        bounds = self._head_bounds if head_rows_only else self._row_bounds
        num_rows, num_heads, head_dim = q.shape
        out = q.new_empty(num_rows, num_heads, head_dim)
        out[bounds[-1] :] = 0
        for index, is_ragged in enumerate(self._is_ragged):
            start, stop = bounds[index], bounds[index + 1]
            if start == stop:
                continue
            if is_ragged:
                rows = slice(self._row_bounds[index], self._row_bounds[index + 1])
                k, v = k_new[rows], v_new[rows]
            else:
                first = self._page_bounds[index] * PAGE_TOKENS
                seen = slice(first, first + self._kv_lengths[index])
                k, v = keys[seen], values[seen]
            out[start:stop] = attend(q[start:stop], k, v)
        return out.view(num_rows, num_heads * head_dim)

    def _cached(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of every page in the plan, ``[pages * 16, kv_heads, head_dim]`` each."""
        pool = self._pool.layers[layer]
        num_pages, _, _, num_kv_heads, head_dim = pool.shape
        halves = pool.view(2 * num_pages, PAGE_TOKENS * num_kv_heads * head_dim)
        gathered = halves.index_select(0, self._halves)
        keys, values = gathered.view(2, -1, num_kv_heads, head_dim).unbind(0)
        return keys, values


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence: q ``[T, heads, d]``, k and v ``[S, kv_heads, d]``, giving ``[T, heads, d]``.

    There is no mask, so that with grouped queries the heads of a group are simply more rows.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    grouped = q.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    queries = grouped.reshape(1, num_kv_heads, group * num_rows, head_dim)
    keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    mixed = F.scaled_dot_product_attention(queries, keys, values)
    parts = mixed.view(num_kv_heads, group, num_rows, head_dim)
    return parts.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)
