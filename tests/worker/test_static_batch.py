"""What graphs are fed: buckets, static arrays, and attention over a fixed batch."""

from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tests.worker.attention_batches import a_pool
from tests.worker.fixed_batches import FixedRows, random_decodes, sent
from tests.worker.flashinfer_fake import FakeFlashInfer
from tests.worker.flashinfer_formulas import attend_blocks
from tests.worker.graph_fake import RecordedCapture, launch
from tests.worker.requests import a_pass

from sangam_core.errors import ConfigurationError
from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.flashinfer_backend import FlashInferAttention
from sangam_worker.attention.flashinfer_layout import measured_kernel
from sangam_worker.attention.protocol import Attention, AttentionBackend
from sangam_worker.attention.torch_backend import TorchAttention
from sangam_worker.graphs.buckets import bucket_of, buckets_up_to, is_capturable
from sangam_worker.graphs.static_batch import StaticBatch, layout_key
from sangam_worker.kv_pool import KVPool
from sangam_worker.packing import pack
from sangam_worker.plan import Pass

BFLOAT16 = torch.bfloat16
CPU = torch.device("cpu")
BLOCK = 8
TOTAL_PAGES = 40


# Buckets


def test_no_pass_of_more_than_four_blocks_is_filled_up_by_more_than_three() -> None:
    assert buckets_up_to(64) == (1, 2, 4, 6, *range(8, 65, 4))
    assert buckets_up_to(256) == buckets_up_to(64)
    assert buckets_up_to(18) == (1, 2, 4, 6, 8, 12, 16, 18)
    assert buckets_up_to(3) == (1, 2, 3)
    assert buckets_up_to(1) == (1,)
    for most in range(1, 70):
        sizes = buckets_up_to(most)
        held = [bucket_of(number, sizes) for number in range(1, min(most, 64) + 1)]
        assert all(size - number <= 3 for number, size in enumerate(held, 1) if size is not None)
        assert None not in held


@pytest.mark.parametrize(
    ("num_blocks", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (16, 16), (17, None)]
)
def test_the_smallest_bucket_that_holds_the_blocks_is_taken(
    num_blocks: int, bucket: int | None
) -> None:
    assert bucket_of(num_blocks, [1, 2, 4, 8, 16]) == bucket


def a_decode(number: int = 0, length: int = 48, start: int = 16, **changes: Any) -> Pass:
    """A pass over a block of 8 rows, on pages of its own."""
    given = {
        "name": str(number),
        "rows": range(start, start + BLOCK),
        "pages": tuple(range(3 * number, 3 * number + 3)),
        "block": range(start, start + BLOCK),
    }
    return a_pass([1] * length, **(given | changes))


@pytest.mark.parametrize(
    ("other", "is_one"),
    [
        (a_decode(1), True),
        (a_decode(1, rows=range(40, 48)), True),
        (a_decode(1, length=45), True),
        (a_decode(1, rows=range(16, 40)), False),  # a block of another length, or a prefix cache's
        (a_decode(1, rows=range(16, 20)), False),
        (a_decode(1, rows=range(48)), False),  # a prefill
        (a_decode(1, length=8, start=0), False),  # a prefill as long as a block
        (a_decode(1, pages=()), False),
    ],
)
def test_only_decodes_of_blocks_of_one_length_are_a_graph_s(other: Pass, is_one: bool) -> None:
    assert is_capturable([a_decode(), other], BLOCK) is is_one


# Static arrays


def a_batch(num_blocks: int = 4, total_pages: int = TOTAL_PAGES) -> StaticBatch:
    return StaticBatch(num_blocks, BLOCK, total_pages, total_pages, CPU)


def mixed_decodes() -> list[Pass]:
    return [
        a_decode(0, pages=(7, 3, 11)),
        a_decode(1, length=37, start=29, pages=(0, 39, 1)),
        a_decode(2, length=16, start=3, pages=(5,)),
    ]


def test_the_layout_of_a_full_batch_is_the_packed_one() -> None:
    passes = mixed_decodes()
    batch = a_batch(3)
    ours, packed = sent(batch, passes), pack(passes, "llada")
    for name in ("qo_indptr", "kv_lengths", "kv_page_indptr", "kv_page_indices"):
        assert getattr(ours, name).tolist() == getattr(packed.layout, name).tolist(), name
    assert ours.kv_last_page_lengths.tolist() == [16, 5, 16]
    assert batch.tokens.tolist()[:24] == packed.tokens.tolist()
    assert batch.positions.tolist()[:24] == packed.positions.tolist()
    assert batch.fixed.write_slots.tolist()[:24] == packed.layout.write_slots.tolist()
    assert ours.write_slots.tolist() == batch.fixed.write_slots.tolist()
    assert batch.fixed.kv_lengths.tolist() == [48, 37, 16]
    assert batch.fixed.page_indptr.tolist() == [0, 3, 6, 7]
    assert batch.fixed.page_indices.tolist()[:7] == packed.layout.kv_page_indices.tolist()


def test_what_fills_up_a_batch_asks_nothing_and_writes_to_the_scratch_page_alone() -> None:
    batch = a_batch(8)
    layout = sent(batch, mixed_decodes())
    assert layout.qo_indptr.tolist() == [0, 8, 16, 24, *[24] * 5]
    assert layout.kv_page_indptr.tolist() == [0, 3, 6, 7, *[7] * 5]
    assert layout.kv_lengths.tolist() == [48, 37, 16, *[0] * 5]
    assert layout.kv_last_page_lengths.tolist() == [16, 5, 16, *[0] * 5]
    assert batch.fixed.kv_lengths.tolist() == layout.kv_lengths.tolist()
    assert batch.fixed.page_indptr.tolist() == layout.kv_page_indptr.tolist()
    slots = batch.fixed.write_slots
    assert (slots[24:] // PAGE_TOKENS == TOTAL_PAGES).all()
    assert (slots[:24] // PAGE_TOKENS < TOTAL_PAGES).all()
    assert (batch.positions[24:] == 0).all()


def test_what_a_larger_batch_left_behind_is_gone_from_a_smaller_one() -> None:
    batch = a_batch(4)
    sent(batch, [a_decode(n) for n in range(4)])
    again = sent(batch, mixed_decodes()[:1])
    fresh = a_batch(4)
    alone = sent(fresh, mixed_decodes()[:1])
    for name in alone.__dataclass_fields__:
        assert np.array_equal(getattr(again, name), getattr(alone, name)), name
    assert torch.equal(batch.positions, fresh.positions)
    assert torch.equal(batch.fixed.write_slots, fresh.fixed.write_slots)


def test_the_full_layout_names_no_page_but_the_scratch_page() -> None:
    batch = a_batch(4, total_pages=2)  # fewer pages than blocks
    full = batch.fixed.full
    assert full.qo_indptr.tolist() == [0, 8, 16, 24, 32]
    assert full.kv_page_indices.tolist() == [2] * 4
    assert (full.write_slots // PAGE_TOKENS == 2).all()
    sent(batch, [a_decode(0, length=16, start=0, pages=(1,))])
    assert full.qo_indptr.tolist() == [0, 8, 16, 24, 32], "it is its own"
    assert batch.send_full() is full
    assert batch.fixed.kv_lengths.tolist() == [16] * 4, "and on the device again"
    assert batch.fixed.page_indices.tolist() == [2] * 4
    assert (batch.fixed.write_slots // PAGE_TOKENS == 2).all()


def test_arrays_stay_where_they_are() -> None:
    batch = a_batch()

    def places() -> list[int]:
        fixed = batch.fixed
        arrays = batch.tokens, batch.positions, fixed.write_slots, fixed.page_indices
        arrays = *arrays, fixed.kv_lengths, fixed.page_indptr
        return [each.data_ptr() for each in arrays]

    before = places()
    for count in (1, 3, 2):
        sent(batch, mixed_decodes()[:count])
        assert places() == before


def test_tokens_alone_can_be_sent() -> None:
    batch, passes = a_batch(), mixed_decodes()
    sent(batch, passes)
    others = [
        a_decode(9, pages=item.pages)._replace(tokens=[number + 5] * BLOCK)
        for number, item in enumerate(passes)
    ]
    kept = batch.positions.clone()
    batch.feed(others)
    batch.send(None)
    assert batch.tokens[:24].tolist() == [5] * 8 + [6] * 8 + [7] * 8
    assert torch.equal(batch.positions, kept)


def test_a_layout_depends_on_pages_rows_and_what_they_see_and_on_nothing_else() -> None:
    base = a_decode()
    assert layout_key([base]) == layout_key([a_decode(masked=[17], step=5, name="other")])
    changes = [{"pages": (0, 1, 3)}, {"sees": 40}, {"rows": range(24, 32)}]
    for change in changes:
        assert layout_key([base]) != layout_key([a_decode(**change)]), change
    assert layout_key([base, a_decode(1)]) != layout_key([a_decode(1), base])


# Attention over a fixed batch

BACKENDS = ["torch", "fa2", "fa3", "blocks"]


def fixed_by_first(backend: AttentionBackend, batch: StaticBatch) -> Attention:
    return backend.fixed(batch.fixed, backend.fixed_kernels(batch.fixed)[0])


def a_backend(name: str, pool: KVPool, num_heads: int) -> Any:
    if name == "torch":
        return TorchAttention(pool)
    if name == "blocks":
        attend = partial(launch, attend_blocks)
        return FlashInferAttention(
            pool, num_heads, FakeFlashInfer(), lambda _: "fa2", attend_blocks=attend
        )
    return FlashInferAttention(pool, num_heads, FakeFlashInfer(), lambda _: name)


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_fixed_batch_attends_and_keeps_as_its_blocks_alone_would(
    name: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    torch.manual_seed(0)
    pool, random = a_pool(num_kv_heads, head_dim, dtype=BFLOAT16), Random(0)
    for layer in pool.layers_and_scratch:
        layer[pool.scratch_page].fill_(torch.nan)  # nobody is to read it
    backend = a_backend(name, pool, num_heads)
    kernel = "blocks 32x64/1" if name == "blocks" else None
    rows = FixedRows(backend, pool, num_heads, 4, BLOCK, kernel)
    # Of what torch's backend plans, a graph would see nothing.
    replay = rows.run if name == "torch" else RecordedCapture()(rows.run)
    for num_blocks in (4, 1, 3):
        rows.check(random_decodes(random, pool, num_blocks, BLOCK), replay)


def test_a_graph_s_kernel_is_the_one_that_was_faster_for_a_full_bucket() -> None:
    kernels = {}
    for num_heads, num_kv_heads in ((4, 4), (4, 2)):
        pool, fake = a_pool(num_kv_heads, 64, dtype=BFLOAT16), FakeFlashInfer()
        backend = FlashInferAttention(
            pool, num_heads, fake, measured_kernel(num_heads, num_kv_heads)
        )
        for num_blocks in (16, 8, 4, 2, 1):
            fixed_by_first(backend, a_batch(num_blocks, pool.total_pages))
            options = [kwargs for name, _, kwargs in fake.calls if "__init__" in name][-1]
            kernels[num_kv_heads, num_blocks] = options["backend"]
    assert [kernels[4, n] for n in (1, 2, 4, 8, 16)] == ["fa2", "fa3", "fa3", "fa3", "fa3"]
    assert [kernels[2, n] for n in (1, 2, 4, 8, 16)] == ["fa2", "fa2", "fa3", "fa3", "fa2"]


def test_fa2_gets_the_workspace_that_its_largest_grid_needs() -> None:
    """Dream-7B's heads: from 32 blocks of 32 queries on, the usual 128 MiB are too few."""
    pool, fake = a_pool(4, 128, dtype=BFLOAT16), FakeFlashInfer()
    backend = FlashInferAttention(pool, 28, fake, lambda _: "fa2")
    sizes = {}
    for num_blocks in (40, 24, 8):
        batch = StaticBatch(num_blocks, 32, pool.total_pages, pool.scratch_page, CPU)
        fixed_by_first(backend, batch).plan(batch.fixed.full)
        made = [args[0] for name, args, _ in fake.calls if "__init__" in name]
        sizes[num_blocks] = made[-1]
    assert len(sizes[40]) > 128 * 2**20
    assert sizes[24] is sizes[40], "shared"
    assert sizes[8] is sizes[40]


def test_torch_s_loop_over_sequences_is_refused_on_a_gpu() -> None:
    class PoolElsewhere:
        device, page_shape, layers_and_scratch = torch.device("cuda"), (2, 16, 1, 16), ()

    backend = TorchAttention(PoolElsewhere())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="use attention 'flashinfer', or no graphs"):
        backend.fixed_kernels(a_batch().fixed)
