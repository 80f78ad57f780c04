"""FlashInfer's attention on a fake of its semantics; and what it cannot run on says so."""

import subprocess
import sys
from random import Random
from typing import Any

import pytest
import torch
from tests.worker.attention_batches import (
    a_pool,
    a_sequence,
    expected,
    is_within_rounding,
    new_sides,
    of_masked,
    packed,
    pages_after,
    random_queries,
    random_sequences,
)
from tests.worker.checkpoints import LLADA
from tests.worker.flashinfer_fake import FakeFlashInfer
from tests.worker.requests import a_pass

from sangam_core.errors import ConfigurationError
from sangam_worker.attention.flashinfer_backend import FlashInferAttention, flashinfer_attention
from sangam_worker.attention.flashinfer_layout import measured_kernel
from sangam_worker.attention.flashinfer_pool import workspace_bytes
from sangam_worker.engine_loading import load_engine
from sangam_worker.packing import pack
from sangam_worker.plan import Pass

BFLOAT16 = torch.bfloat16


def a_backend(
    pool: Any, num_heads: int, kernel: str = "fa2"
) -> tuple[FlashInferAttention, FakeFlashInfer]:
    fake = FakeFlashInfer()
    return FlashInferAttention(pool, num_heads, fake, lambda layout: kernel), fake


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("seed", range(6))
def test_every_sequence_attends_to_itself_and_nothing_else(
    num_heads: int, num_kv_heads: int, head_dim: int, seed: int
) -> None:
    torch.manual_seed(seed)
    pool = a_pool(num_kv_heads, head_dim, dtype=BFLOAT16)
    backend, _ = a_backend(pool, num_heads)
    for turn in range(2):  # a second plan replaces the first
        pool.layers[1].fill_(torch.nan)
        sequences = random_sequences(Random(10 * seed + turn), pool)
        queries = random_queries(sequences, num_heads, pool)
        heads = of_masked(queries, sequences)
        backend.plan(pack([sequence.item for sequence in sequences], "llada").layout)

        out = backend.run(packed(queries), *new_sides(sequences), 1)
        chosen = backend.run(packed(heads), *new_sides(sequences), 1, head_rows_only=True)

        assert out.dtype == BFLOAT16
        assert is_within_rounding(out, *expected(queries, sequences))
        assert is_within_rounding(chosen, *expected(heads, sequences))


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("seed", range(6))
def test_new_rows_are_kept_on_their_pages_and_nothing_else_changes(
    head_dim: int, seed: int
) -> None:
    torch.manual_seed(seed)
    pool = a_pool(2, head_dim, dtype=BFLOAT16)
    sequences = random_sequences(Random(seed), pool)
    wanted = [pool.layers[0].clone(), pages_after(sequences, pool.layers[1])]
    backend, _ = a_backend(pool, 2)
    backend.plan(pack([sequence.item for sequence in sequences], "llada").layout)
    backend.write(*new_sides(sequences), 1)
    for layer, after in zip(pool.layers, wanted, strict=True):
        assert torch.equal(layer.nan_to_num(9.0), after.nan_to_num(9.0))


def decode_blocks_and_prefill() -> list[Pass]:
    return [
        a_pass([1] * 100, name="a", rows=range(32, 64), pages=(7, 3, 11, 0, 5, 9, 2), masked=[40]),
        a_pass([1] * 64, name="b", rows=range(32, 64), pages=(1, 4, 6, 8), masked=[33, 63]),
        a_pass([1] * 33, name="c", pages=(10, 13, 12), masked=[32]),
    ]


def test_decode_blocks_and_whole_prefills_are_one_plan() -> None:
    torch.manual_seed(0)
    pool = a_pool(2, 128, dtype=BFLOAT16)
    backend, fake = a_backend(pool, 4)
    sequences = [a_sequence(item, pool) for item in decode_blocks_and_prefill()]
    queries = random_queries(sequences, 4, pool)
    backend.plan(pack([each.item for each in sequences], "llada").layout)
    for _ in range(3):  # layers
        backend.run(packed(queries), *new_sides(sequences), 1)
    pages = [7, 3, 11, 0, 5, 9, 2, 1, 4, 6, 8, 10, 13, 12]
    every_row = {
        "kind": "paged",
        "qo_indptr": [0, 32, 64, 97],
        "kv_indptr": [0, 7, 11, 14],
        "kv_indices": pages,
        "last_page_len": [4, 16, 1],
    }
    assert fake.planned == [every_row, every_row | {"qo_indptr": [0, 1, 3, 4]}]
    assert fake.called("BatchPrefillWithPagedKVCacheWrapper.run") == 3
    assert fake.called("append_paged_kv_cache") == 3


def test_sequences_without_pages_have_a_plan_of_their_own() -> None:
    pool = a_pool(2, 64, dtype=BFLOAT16)
    backend, fake = a_backend(pool, 2)
    passes = [a_pass([1] * 7, name="none"), *decode_blocks_and_prefill()[:1]]
    backend.plan(pack(passes, "llada").layout)
    paged, ragged, paged_heads = fake.planned
    assert (paged["qo_indptr"], paged_heads["qo_indptr"]) == ([0, 32], [0, 1])
    assert ragged == {"kind": "ragged", "qo_indptr": [0, 7], "kv_indptr": [0, 7]}


def test_wrappers_are_made_once_and_share_one_workspace() -> None:
    pool = a_pool(2, 64, dtype=BFLOAT16)
    backend, fake = a_backend(pool, 2)
    for _ in range(3):
        backend.plan(pack(decode_blocks_and_prefill(), "llada").layout)
    made = [
        args[0] for name, args, _ in fake.calls if name.startswith("Batch") and "__init__" in name
    ]
    assert len(made) == 2
    assert made[0] is made[1]


def test_the_workspace_holds_what_fa2_splits_on_any_gpu() -> None:
    """28 heads over 4, of 128: ``num_heads * splits * 128 * head_dim`` floats, and a sum each."""
    h200, b200 = (workspace_bytes(28, 4, 128, number) for number in (132, 148))
    assert h200 == workspace_bytes(32, 32, 128, 148) == 128 * 2**20
    assert b200 >= 28 * (2 * 148 // 4) * 128 * (128 + 1) * 4 > 128 * 2**20


def test_nothing_is_attended_where_no_row_can_commit() -> None:
    pool = a_pool(2, 64, dtype=BFLOAT16)
    backend, fake = a_backend(pool, 2)
    backend.plan(pack([a_pass([1] * 40, pages=(5, 2, 9))], "llada").layout)
    assert len(fake.planned) == 1


@pytest.mark.parametrize(
    ("num_kv_heads", "passes", "kernel"),
    [
        (32, decode_blocks_and_prefill()[:1], "fa2"),
        (32, decode_blocks_and_prefill()[:2], "fa3"),
        (4, decode_blocks_and_prefill()[:2], "fa2"),
        (4, [*decode_blocks_and_prefill()[:2], a_pass([1] * 200)], "fa3"),
        (32, [a_pass([1] * 200)], "fa3"),
    ],
)
def test_the_kernel_is_the_one_that_was_faster(
    num_kv_heads: int, passes: list[Pass], kernel: str
) -> None:
    assert measured_kernel(32, num_kv_heads)(pack(passes, "llada").layout) == kernel


def test_the_chosen_kernel_gets_a_wrapper_of_its_own() -> None:
    pool, fake = a_pool(2, 64, dtype=BFLOAT16), FakeFlashInfer()
    backend = FlashInferAttention(pool, 2, fake, measured_kernel(2, 2))
    for count in (1, 2, 1):
        backend.plan(pack(decode_blocks_and_prefill()[:count], "llada").layout)
    kernels = [options["backend"] for name, _, options in fake.calls if "__init__" in name]
    assert kernels == ["fa2", "fa2", "fa3", "fa3"]


# What cannot run says so


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "flashinfer"}, "FlashInfer needs a CUDA device, not 'cpu'"),
        ({"attention": "flashinfer-fa3"}, "FlashInfer needs a CUDA device, not 'cpu'"),
        ({"operators": "flashinfer"}, "FlashInfer needs a CUDA device, not 'cpu'"),
        ({"operators": "fused"}, "operators 'fused' is unknown; use one of torch, flashinfer"),
    ],
)
def test_a_cpu_engine_refuses_flashinfer_in_one_line(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_engine(str(LLADA), total_pages=1, **options)  # type: ignore[arg-type]


def test_heads_larger_than_any_kernel_s_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no kernel for heads of 320"):
        a_backend(a_pool(1, 320, dtype=BFLOAT16), 1)


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cuda", torch.float32, "FlashInfer needs dtype bfloat16, not float32"),
        (
            "cuda",
            BFLOAT16,
            r"FlashInfer cannot be imported .*; from the checkout: pip install",
        ),
    ],
)
def test_what_flashinfer_needs_is_checked_before_anything_else(
    device: str, dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pool:
        def __init__(self) -> None:
            self.device, self.dtype = torch.device(device), dtype

    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigurationError, match=message):
        flashinfer_attention(Pool(), 1)  # type: ignore[arg-type]


def test_a_cpu_worker_never_imports_flashinfer() -> None:
    code = (
        "import sys, sangam_worker.engine_loading, sangam_worker.__main__\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'flashinfer'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
