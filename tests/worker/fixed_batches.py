"""Decodes of blocks for tests of fixed batches: what a graph reads, and what it should do."""

from collections.abc import Callable, Sequence
from random import Random

import torch
from tests.worker.attention_batches import (
    a_sequence,
    expected,
    is_within_rounding,
    new_sides,
    packed,
    pages_after,
    random_queries,
)
from tests.worker.requests import a_pass
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.layout import AttentionLayout
from sangam_worker.attention.protocol import Attention, AttentionBackend
from sangam_worker.graphs.static_batch import StaticBatch, layout_key
from sangam_worker.kv_pool import KVPool
from sangam_worker.plan import Pass


def random_decodes(
    random: Random, pool: KVPool, num_blocks: int, block_tokens: int, longest: int = 100
) -> list[Pass]:
    """Passes over a block each, at any place in sequences of any length, on any pages."""
    free = random.sample(range(pool.total_pages), pool.total_pages)
    passes = []
    for number in range(num_blocks):
        length = random.randint(block_tokens, longest)
        start = random.randint(0, length - block_tokens)
        rows = range(start, start + block_tokens)
        pages = tuple(free.pop() for _ in range(-(-length // PAGE_TOKENS)))
        passes.append(a_pass([1] * length, name=str(number), rows=rows, pages=pages))
    return passes


def sent(batch: StaticBatch, passes: Sequence[Pass]) -> AttentionLayout:
    """Everything of an iteration on the device; its layout."""
    batch.feed(passes)
    layout = batch.lay_out(layout_key(passes))
    batch.send(layout)
    return layout


class FixedRows:
    """Attention of one layer over a fixed batch: queries, keys and values at one place for good.

    Attributes:
        attention: planned with a full batch, as for a capture. out: of the last run.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        pool: KVPool,
        num_heads: int,
        num_blocks: int,
        block_tokens: int,
        kernel: str | None = None,
    ) -> None:
        self._pool, self._num_heads = pool, num_heads
        self.batch = StaticBatch(
            num_blocks, block_tokens, pool.total_pages, pool.scratch_page, pool.device
        )
        fixed = self.batch.fixed
        name = backend.fixed_kernels(fixed)[0] if kernel is None else kernel
        self.attention: Attention = backend.fixed(fixed, name)
        self.attention.plan(self.batch.fixed.full)
        num_rows, (_, _, num_kv_heads, head_dim) = len(self.batch.tokens), pool.page_shape
        on_device = {"dtype": pool.dtype, "device": pool.device}
        self._q = torch.zeros(num_rows, num_heads, head_dim, **on_device)  # type: ignore[arg-type]
        self._k = torch.zeros(num_rows, num_kv_heads, head_dim, **on_device)  # type: ignore[arg-type]
        self._v = torch.zeros_like(self._k)
        self.out = self._q

    def run(self) -> None:
        """What is captured."""
        self.out = self.attention.run(self._q, self._k, self._v, 1)

    def check(self, passes: Sequence[Pass], replay: Callable[[], None]) -> None:
        """Plan other blocks, run, and compare with the formula; rows in excess are not numbers."""
        pool = self._pool
        sequences = [a_sequence(item, pool) for item in passes]
        wanted = pages_after(sequences, pool.layers[1])
        others = pool.layers[0].clone()
        queries = random_queries(sequences, self._num_heads, pool)
        num_rows = sum(len(each) for each in queries)
        values: tuple[Tensor, ...] = packed(queries), *new_sides(sequences)
        for static, own in zip((self._q, self._k, self._v), values, strict=True):
            static.fill_(torch.nan)
            static[:num_rows] = own[:num_rows]
        self.attention.plan(sent(self.batch, passes))
        replay()
        exact, size = expected(queries, sequences)
        assert is_within_rounding(self.out[:num_rows], exact[:num_rows], size[:num_rows])
        assert self.out.isfinite().all(), "rows that fill up the batch are finite"
        assert torch.equal(pool.layers[1].nan_to_num(9.0), wanted.nan_to_num(9.0))
        assert torch.equal(pool.layers[0].nan_to_num(9.0), others.nan_to_num(9.0))
