"""Packed batches for tests of attention backends, and what they should give by the formula."""

from dataclasses import dataclass
from random import Random

import torch
from tests.worker.requests import a_pass
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.kv_pool import KVPool
from sangam_worker.plan import Pass

TOTAL_PAGES = 60


@dataclass
class Sequence:
    """A sequence's K and V as they are to be seen, and the pass that feeds some of its rows."""

    item: Pass
    keys: Tensor
    values: Tensor

    @property
    def new_rows(self) -> list[int]:
        return list(self.item.positions)


def a_pool(
    num_kv_heads: int,
    head_dim: int,
    *,
    total_pages: int = TOTAL_PAGES,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> KVPool:
    """Two layers full of NaN: what was never written cannot be read unnoticed."""
    pool = KVPool(
        num_layers=2,
        total_pages=total_pages,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )
    for layer in pool.layers:
        layer.fill_(torch.nan)
    return pool


def a_sequence(item: Pass, pool: KVPool) -> Sequence:
    """Random K and V; those of the rows that are not fed are on the pages of layer 1."""
    length = item.sees
    shape = (2, length, *pool.page_shape[2:])
    keys, values = torch.randn(shape).to(pool.device, pool.dtype).unbind(0)
    for position in sorted(set(range(length)) - set(item.positions)):
        page = pool.layers[1][item.pages[position // PAGE_TOKENS]]
        page[0, position % PAGE_TOKENS] = keys[position]
        page[1, position % PAGE_TOKENS] = values[position]
    return Sequence(item, keys, values)


def random_sequences(random: Random, pool: KVPool) -> list[Sequence]:
    """Blocks, whole sequences with and without pages, in any order, on any pages."""
    free = random.sample(range(pool.total_pages), pool.total_pages)
    sequences = []
    for name in range(random.randint(1, 6)):
        length = random.randint(1, 100)
        start = random.randrange(length)
        stop = random.randint(start + 1, length)
        rows = range(length) if random.random() < 0.3 else range(start, stop)
        masked = sorted(random.sample(rows, random.randint(0, len(rows))))
        has_pages = len(rows) < length or random.random() < 0.5
        pages = tuple(free.pop() for _ in range(-(-length // PAGE_TOKENS))) if has_pages else ()
        item = a_pass([1] * length, name=str(name), rows=rows, masked=masked, pages=pages)
        sequences.append(a_sequence(item, pool))
    return sequences


def packed(rows: list[Tensor], num_padding: int = 16) -> Tensor:
    """Rows behind each other, and padding that must not count."""
    return torch.cat([*rows, rows[0].new_full((num_padding, *rows[0].shape[1:]), 7.0)])


def new_sides(sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
    """K and V of the fed rows, packed."""
    return (
        packed([each.keys[each.new_rows] for each in sequences]),
        packed([each.values[each.new_rows] for each in sequences]),
    )


def random_queries(sequences: list[Sequence], num_heads: int, pool: KVPool) -> list[Tensor]:
    """Queries of each sequence's fed rows."""
    head_dim = pool.page_shape[3]
    return [
        torch.randn(len(each.new_rows), num_heads, head_dim).to(pool.device, pool.dtype)
        for each in sequences
    ]


def of_masked(queries: list[Tensor], sequences: list[Sequence]) -> list[Tensor]:
    """The queries of the rows that can commit (LLaDA's: the masked ones)."""
    return [
        q[[position - each.new_rows[0] for position in each.item.masked]]
        for q, each in zip(queries, sequences, strict=True)
    ]


def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``[T, heads * d]`` by the formula in float64, and the same of the values' sizes.

    The second one bounds what rounding can do: each probability and each result may be off by
    a unit of its format, times what it is multiplied with.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (side.double().repeat_interleave(group, 1) for side in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) / q.shape[2] ** 0.5
    weights = scores.softmax(-1)
    return tuple(torch.einsum("hts,shd->thd", weights, x).flatten(1) for x in (v, v.abs()))  # type: ignore[return-value]


def expected(queries: list[Tensor], sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
    """What a backend gives for packed queries, padding included, and its rounding bound's scale."""
    pairs = [dense(q, each.keys, each.values) for q, each in zip(queries, sequences, strict=True)]
    padding = pairs[0][0].new_zeros(16, pairs[0][0].shape[1])
    answers, sizes = zip(*pairs, strict=True)
    return torch.cat([*answers, padding]), torch.cat([*sizes, padding])


def pages_after(sequences: list[Sequence], layer: Tensor) -> Tensor:
    """A copy of a layer with the fed rows' K and V on their pages."""
    layer = layer.clone()
    for each in sequences:
        for position in each.item.positions if each.item.pages else ():
            page = layer[each.item.pages[position // PAGE_TOKENS]]
            page[0, position % PAGE_TOKENS] = each.keys[position]
            page[1, position % PAGE_TOKENS] = each.values[position]
    return layer


ROUNDINGS = 3
"""Of the probabilities, of partial results where keys are split, and of the result."""


def is_within_rounding(out: Tensor, answers: Tensor, sizes: Tensor) -> bool:
    """Whether a result is as near as bfloat16 with float32 sums allows; NaN is not."""
    unit = torch.finfo(torch.bfloat16).eps / 2
    bound = (ROUNDINGS + 0.5) * unit * sizes + 1e-6
    return bool(((out.double() - answers).abs() <= bound).all())
