"""The torch backend against dense attention: pages in any order, mixed with ragged sequences."""

from random import Random

import pytest
import torch
from tests.worker.attention_batches import (
    a_pool,
    expected,
    new_sides,
    of_masked,
    packed,
    pages_after,
    random_queries,
    random_sequences,
)
from tests.worker.requests import a_pass

from sangam_worker.attention.torch_backend import TorchAttention
from sangam_worker.packing import pack

HEAD_DIM = 16


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("seed", range(8))
def test_every_sequence_attends_to_itself_and_nothing_else(
    num_heads: int, num_kv_heads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    pool = a_pool(num_kv_heads, HEAD_DIM)
    sequences = random_sequences(Random(seed), pool)
    backend = TorchAttention(pool)
    backend.plan(pack([sequence.item for sequence in sequences], "llada").layout)
    queries = random_queries(sequences, num_heads, pool)
    heads = of_masked(queries, sequences)

    out = backend.run(packed(queries), *new_sides(sequences), 1)
    chosen = backend.run(packed(heads), *new_sides(sequences), 1, head_rows_only=True)

    assert torch.allclose(out, expected(queries, sequences)[0].float(), atol=1e-5)
    assert torch.allclose(chosen, expected(heads, sequences)[0].float(), atol=1e-5)


def test_new_rows_are_kept_on_their_pages_and_nothing_else_changes() -> None:
    torch.manual_seed(0)
    pool = a_pool(2, HEAD_DIM)
    sequences = random_sequences(Random(4), pool)
    wanted = [pool.layers[0].clone(), pages_after(sequences, pool.layers[1])]
    backend = TorchAttention(pool)
    backend.plan(pack([sequence.item for sequence in sequences], "llada").layout)
    backend.write(*new_sides(sequences), 1)
    for layer, after in zip(pool.layers, wanted, strict=True):
        assert torch.equal(layer.nan_to_num(9.0), after.nan_to_num(9.0))


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
