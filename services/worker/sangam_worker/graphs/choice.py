"""Which kernel attends in a graph: the fastest on this device, for this many blocks.

Decides on what they are tried: random keys and values of a usual length, through all layers, so
that none finds its keys in a cache. It is measured at every start, since what is fastest depends on
the GPU, the model's heads and the number of blocks. Called by ``runner`` before a graph is
captured; the pool is nobody's then, and is zeros again afterwards.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.protocol import Attention, AttentionBackend, KeepsRows
from sangam_worker.fastest import Fastest, Stopwatch, fastest
from sangam_worker.graphs.static_batch import LayoutKey, StaticBatch
from sangam_worker.kv_pool import KVPool

_TOKENS = 1024
"""Of each sequence, where the pool has room."""


def fastest_kernel(
    backend: AttentionBackend,
    pool: KVPool,
    batch: StaticBatch,
    num_heads: int,
    measure: Stopwatch,
) -> Fastest:
    """One of the backend's kernels for batches of this size. The batch holds another layout then.

    Args:
        num_heads: query heads.
    """
    kernels = backend.fixed_kernels(batch.fixed)
    if len(kernels) == 1:
        return Fastest(kernels[0], 1.0)
    trial = _Trial(backend, pool, batch, num_heads, measure)
    try:
        return fastest("attention kernel", kernels, trial)
    finally:
        trial.end()


class _Trial:
    """Tries kernels on random queries, keys and values."""

    def __init__(
        self,
        backend: AttentionBackend,
        pool: KVPool,
        batch: StaticBatch,
        num_heads: int,
        measure: Stopwatch,
    ) -> None:
        self._backend, self._pool, self._fixed = backend, pool, batch.fixed
        self._measure = measure
        fixed, (_, _, _, head_dim) = batch.fixed, pool.page_shape
        shape = len(fixed.write_slots), num_heads, head_dim
        self._queries = torch.randn(shape, dtype=pool.dtype, device=pool.device)
        key = usual_layout(fixed.num_sequences, fixed.rows_per_sequence, pool.total_pages)
        self._num_pages = 1 + max(page for pages, _, _ in key for page in pages)
        for layer in pool.layers:
            layer[: self._num_pages].normal_()
        self._layout = batch.lay_out(key)
        batch.send(self._layout)

    def __call__(self, kernel: str) -> tuple[float, Tensor]:
        """Seconds for all layers, and the last one's answers."""
        attention: Attention = self._backend.fixed(self._fixed, kernel)
        assert isinstance(attention, KeepsRows)
        attend, answers = attention.attend, self._queries
        attention.plan(self._layout)

        def run() -> None:
            nonlocal answers
            for layer in range(self._pool.num_layers):
                answers = attend(self._queries, layer)

        seconds = self._measure(run)
        return seconds, answers.to(torch.float32, copy=True)

    def end(self) -> None:
        """Leave zeros, as there were."""
        for layer in self._pool.layers:
            layer[: self._num_pages].zero_()


def usual_layout(num_sequences: int, block_tokens: int, total_pages: int) -> LayoutKey:
    """Sequences of a usual length that are at their last block, on pages that lie anywhere."""
    most_pages = min(_TOKENS // PAGE_TOKENS, max(1, total_pages // num_sequences))
    num_pages = max(most_pages, -(-block_tokens // PAGE_TOKENS))
    sees = num_pages * PAGE_TOKENS
    order = torch.randperm(num_sequences * num_pages, generator=torch.Generator().manual_seed(0))
    # In a pool that is too small, sequences share pages.
    numbers: Sequence[Sequence[int]] = (order % total_pages).view(num_sequences, -1).tolist()
    return tuple((tuple(pages), sees - block_tokens, sees) for pages in numbers)
