"""The torch backend against dense attention: pages in any order, mixed with ragged sequences."""

from dataclasses import dataclass
from random import Random

import pytest
import torch
from tests.worker.requests import a_pass
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.torch_backend import TorchAttention
from sangam_worker.kv_pool import KVPool
from sangam_worker.packing import pack
from sangam_worker.plan import Pass

HEAD_DIM = 16
TOTAL_PAGES = 60


@dataclass
class Sequence:
    """A sequence's K and V as they are to be seen, and the pass that feeds some of its rows."""

    item: Pass
    keys: Tensor
    values: Tensor


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[T, heads, d]`` by the formula, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (side.double().repeat_interleave(group, 1) for side in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) / q.shape[2] ** 0.5
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1).float()


def random_sequences(random: Random, num_kv_heads: int, pool: KVPool) -> list[Sequence]:
    """Sequences whose cached rows are on their pages; the fed rows' pages hold NaN."""
    free = random.sample(range(TOTAL_PAGES), TOTAL_PAGES)
    for layer in pool.layers:
        layer.fill_(torch.nan)
    sequences = []
    for name in range(random.randint(1, 6)):
        length = random.randint(1, 100)
        start = random.randrange(length)
        stop = random.randint(start + 1, length)
        rows = range(length) if random.random() < 0.3 else range(start, stop)
        masked = sorted(random.sample(rows, random.randint(0, len(rows))))
        has_pages = len(rows) < length or random.random() < 0.5
        pages = tuple(free.pop() for _ in range(-(-length // PAGE_TOKENS))) if has_pages else ()
        keys, values = torch.randn(2, length, num_kv_heads, HEAD_DIM).unbind(0)
        item = a_pass([1] * length, name=str(name), rows=rows, masked=masked, pages=pages)
        sequences.append(Sequence(item, keys, values))
        for position in set(range(length)) - set(rows):
            page = pool.layers[1][pages[position // PAGE_TOKENS]]
            page[0, position % PAGE_TOKENS] = keys[position]
            page[1, position % PAGE_TOKENS] = values[position]
    return sequences


def packed(rows: list[Tensor], num_padding: int = 16) -> Tensor:
    """Rows behind each other, and padding that must not count."""
    return torch.cat([*rows, torch.full((num_padding, *rows[0].shape[1:]), 7.0)])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("seed", range(8))
def test_every_sequence_attends_to_itself_and_nothing_else(
    num_heads: int, num_kv_heads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    pool = KVPool(
        num_layers=2, total_pages=TOTAL_PAGES, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM
    )
    sequences = random_sequences(Random(seed), num_kv_heads, pool)
    backend = TorchAttention(pool)
    backend.plan(pack([sequence.item for sequence in sequences], "llada").layout)
    queries = [torch.randn(len(s.item.positions), num_heads, HEAD_DIM) for s in sequences]
    new_keys, new_values = (
        packed([getattr(s, side)[list(s.item.positions)] for s in sequences])
        for side in ("keys", "values")
    )

    out = backend.run(packed(queries), new_keys, new_values, 1)

    expected = [dense(q, s.keys, s.values) for q, s in zip(queries, sequences, strict=True)]
    assert torch.allclose(out, torch.cat([*expected, torch.zeros(16, out.shape[1])]), atol=1e-5)

    heads = [
        q[[p - s.item.positions[0] for p in s.item.masked]]
        for q, s in zip(queries, sequences, strict=True)
    ]
    chosen = backend.run(packed(heads), new_keys, new_values, 1, head_rows_only=True)
    wanted = [dense(q, s.keys, s.values) for q, s in zip(heads, sequences, strict=True)]
    assert torch.allclose(chosen, torch.cat([*wanted, torch.zeros(16, out.shape[1])]), atol=1e-5)


def test_new_rows_are_kept_on_their_pages_and_nothing_else_changes() -> None:
    torch.manual_seed(0)
    pool = KVPool(num_layers=2, total_pages=TOTAL_PAGES, num_kv_heads=2, head_dim=HEAD_DIM)
    sequences = random_sequences(Random(4), 2, pool)
    before = [layer.clone() for layer in pool.layers]
    backend = TorchAttention(pool)
    backend.plan(pack([sequence.item for sequence in sequences], "llada").layout)
    new_keys, new_values = (
        packed([getattr(s, side)[list(s.item.positions)] for s in sequences])
        for side in ("keys", "values")
    )
    backend.write(new_keys, new_values, 1)
    for sequence in sequences:
        for position in sequence.item.positions if sequence.item.pages else ():
            page = sequence.item.pages[position // PAGE_TOKENS]
            before[1][page, 0, position % PAGE_TOKENS] = sequence.keys[position]
            before[1][page, 1, position % PAGE_TOKENS] = sequence.values[position]
    for layer, expected in zip(pool.layers, before, strict=True):
        assert torch.equal(layer.nan_to_num(9.0), expected.nan_to_num(9.0))


def test_the_layout_reads_like_flashinfers_arguments() -> None:
    passes = [
        a_pass([1] * 40, name="block", rows=range(20, 28), pages=(5, 2, 9), masked=[21, 27]),
        a_pass([1] * 7, name="none", masked=[0]),
        a_pass([1] * 33, name="prefill", pages=(4, 3, 8)),
    ]
    batch = pack(passes, "llada")
    layout = batch.layout
    assert layout.qo_indptr.tolist() == [0, 8, 15, 48]
    assert layout.head_indptr.tolist() == [0, 2, 3, 3]
    assert layout.kv_lengths.tolist() == [40, 7, 33]
    assert layout.is_ragged.tolist() == [False, True, True]
    assert layout.kv_page_indptr.tolist() == [0, 3, 3, 3]
    assert layout.kv_page_indices.tolist() == [5, 2, 9]
    assert layout.kv_last_page_lengths.tolist() == [8, 0, 0]
    assert layout.write_rows.tolist() == [*range(8), *range(15, 48)]
    assert layout.write_slots[:8].tolist() == [2 * 16 + slot for slot in range(4, 12)]
    assert layout.write_slots[-1] == 8 * 16
    assert batch.head_rows.tolist() == [1, 7, 8]


def test_dreams_head_rows_are_those_before_the_masks() -> None:
    passes = [
        a_pass([1] * 40, rows=range(20, 28), pages=(5, 2, 9), masked=[21, 27]),
        a_pass([1] * 7, name="none", masked=[0, 1, 6]),
    ]
    assert pack(passes, "dream").head_rows.tolist() == [0, 6, 8, 8, 13]
