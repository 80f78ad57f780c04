"""FlashInfer's backend and operators: on a fake of its semantics, and by its signatures."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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
from tests.worker.checkpoints import DREAM, LLADA, dream_config, llada_config, write_checkpoint
from tests.worker.flashinfer_fake import SIGNATURES, FakeFlashInfer, append_paged_kv_cache
from tests.worker.flashinfer_installed import installed_signatures, run_with_flashinfer
from tests.worker.graph_fake import EagerCapture
from tests.worker.requests import a_pass, a_plan
from torch import Tensor

from sangam_core.errors import ConfigurationError
from sangam_worker.attention.flashinfer_backend import FlashInferAttention, flashinfer_attention
from sangam_worker.attention.flashinfer_layout import measured_kernel
from sangam_worker.attention.flashinfer_pool import workspace_bytes
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine
from sangam_worker.models.config import read_model_config
from sangam_worker.models.flashinfer_operators import FlashInferOperators
from sangam_worker.models.linear import PlainLinear
from sangam_worker.models.operators import TorchOperators
from sangam_worker.packing import pack
from sangam_worker.plan import Pass

BFLOAT16 = torch.bfloat16
CPU = torch.device("cpu")
UNIT = torch.finfo(BFLOAT16).eps / 2


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


# The engine


def an_engine(model: Path, fake: FakeFlashInfer | None, dtype: str = "bfloat16") -> Engine:
    if fake is None:
        return load_engine(str(model), dtype=dtype, total_pages=40)
    return load_engine(
        str(model),
        dtype=dtype,
        total_pages=40,
        attention=lambda pool, heads: FlashInferAttention(pool, heads, fake, lambda _: "fa2"),
        operators=lambda *args: FlashInferOperators(*args, fake),
        graph_buckets=(1, 2),
        graph_block_tokens=8,
    )


MODELS: dict[str, Any] = {
    "llada-tiny": LLADA,
    "dream-tiny": DREAM,
    "llada-64": llada_config(d_model=128, n_heads=2, n_kv_heads=2, mlp_hidden_size=192),
    "dream-64": dream_config(
        hidden_size=192, num_attention_heads=3, num_key_value_heads=1, intermediate_size=128
    ),
}


def model_at(name: str, tmp_path: Path) -> Path:
    model = MODELS[name]
    return model if isinstance(model, Path) else write_checkpoint(tmp_path / name, model)


def some_logits(engine: Engine) -> list[Tensor]:
    """A prefill and a request without a cache, then a decode on the prefill's pages."""
    random = Random(1)
    ids = [random.randrange(280) for _ in range(60)]
    pages = (7, 3, 11, 0)
    prefill = a_pass(ids, pages=pages, masked=range(40, 48))
    alone = a_pass(ids[:21], name="b", masked=[2, 20])
    decode = a_pass(ids, rows=range(40, 48), pages=pages, masked=range(40, 48))
    return [
        engine.forward(a_plan(alone, prefill))[:10].float(),
        engine.forward(a_plan(decode))[:8].float(),
        engine.forward(a_plan(a_pass(ids[:5], pages=(4,)))).float(),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_is_as_near_to_float32_as_with_torch_in_bfloat16(
    name: str, tmp_path: Path
) -> None:
    model, fake = model_at(name, tmp_path), FakeFlashInfer()
    exact = some_logits(an_engine(model, None, "float32"))
    plain = some_logits(an_engine(model, None))
    fused = some_logits(an_engine(model, fake))
    for wanted, torchs, ours in zip(exact, plain, fused, strict=True):
        assert ours.shape == wanted.shape
        if len(wanted):
            error, allowed = ((each - wanted).square().mean().sqrt() for each in (ours, torchs))
            assert error <= 1.5 * allowed
    has_64 = name.endswith("64")
    assert (fake.called("apply_rope_with_cos_sin_cache_inplace") > 0) == has_64
    assert (fake.called("append_paged_kv_cache") > 0) == has_64
    assert fake.called("fused_add_rmsnorm") > 0
    assert fake.called("silu_and_mul") > 0


def test_every_call_binds_to_the_installed_signatures(tmp_path: Path) -> None:
    real = installed_signatures(*SIGNATURES)
    fake = FakeFlashInfer()
    for name in ("llada-64", "dream-tiny"):
        engine = an_engine(model_at(name, tmp_path), fake)
        some_logits(engine)
        engine.capture_graphs(capture=EagerCapture())
        decode = a_pass([1] * 60, rows=range(40, 48), pages=(7, 3, 11, 0), masked=range(40, 48))
        assert engine.replay(a_plan(decode)) is not None
    for name, args, kwargs in fake.calls:
        bound = real[name].bind(*args, **kwargs)
        assert not bound.arguments.get("args"), f"{name} takes what is left over for other kernels"
    assert {name for name, _, _ in fake.calls} == set(SIGNATURES)


def test_the_fake_takes_what_the_installed_library_takes() -> None:
    real = installed_signatures(*SIGNATURES)
    for name, function in SIGNATURES.items():
        theirs = real[name].parameters
        ours = inspect.signature(function).parameters
        for each in ours.values():
            default = each.empty if each.default is each.empty else repr(each.default)
            assert theirs[each.name].default == default, f"{name}: {each.name}"
        positional = [each.name for each in ours.values() if each.kind is not each.KEYWORD_ONLY]
        assert positional == list(theirs)[: len(positional)], name


def test_the_installed_library_s_own_code_takes_every_call_down_to_its_kernels() -> None:
    done = run_with_flashinfer("tests.worker.flashinfer_on_cpu")
    assert (done.returncode, done.stdout) == (0, "as expected\n"), done.stderr[-3000:]


# Operators


def an_operator_pair(model: Path) -> tuple[FlashInferOperators, TorchOperators, FakeFlashInfer]:
    config, fake = read_model_config(model, name="a"), FakeFlashInfer()
    return (
        FlashInferOperators(config, BFLOAT16, CPU, fake),
        TorchOperators(config, BFLOAT16, CPU),
        fake,
    )


def near(ours: Tensor, torchs: Tensor, num_units: float) -> bool:
    """Whether two results in bfloat16 differ by few units of the last place."""
    return torch.allclose(ours.float(), torchs.float(), rtol=num_units * UNIT, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_operators_differ_from_torch_by_their_roundings_alone(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours, torchs, _ = an_operator_pair(model_at(name, tmp_path))
    x, weight = torch.randn(48, 96).to(BFLOAT16), torch.randn(96).to(BFLOAT16)
    product = PlainLinear(torch.randn(96, 96).to(BFLOAT16), None)
    assert near(ours.norm(x, weight), torchs.norm(x, weight), 3)

    inputs = torch.randn(48, 96).to(BFLOAT16)
    (summed, normed), (wanted, wanted_normed) = (
        each.add_norm(product, inputs, x.clone(), weight) for each in (ours, torchs)
    )
    assert torch.allclose(summed.float(), wanted.float(), atol=0.3)
    assert torch.allclose(normed.float(), wanted_normed.float(), atol=0.15)

    gate, up = torch.randn(2, 64, 96).div(10).to(BFLOAT16).unbind(0)
    gated = [each.gate_up(gate.clone(), up.clone())(inputs) for each in (ours, torchs)]
    assert torch.allclose(gated[0].float(), gated[1].float(), rtol=4 * UNIT, atol=0.02)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_heads", [1, 3])
def test_rotations_agree_beyond_the_first_table_and_on_chosen_rows(
    name: str, num_heads: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = model_at(name, tmp_path)
    ours, torchs, _ = an_operator_pair(model)
    head_dim = read_model_config(model, name="a").head_dim
    wide = torch.randn(16, num_heads + 2, head_dim).to(BFLOAT16)
    positions, rows = torch.arange(16) * 331, torch.tensor([9, 0, 15])
    for each in (ours, torchs):
        each.reserve(5000)
    turned = [each.rotation(positions)(wide.clone()[:, :num_heads]) for each in (ours, torchs)]
    chosen = [
        each.rotation(positions).select(rows)(wide[rows][:, :num_heads]) for each in (ours, torchs)
    ]
    assert torch.allclose(turned[0].float(), turned[1].float(), atol=0.05)
    assert torch.allclose(chosen[0].float(), turned[0][rows].float())
    assert torch.allclose(chosen[1].float(), turned[1][rows].float())


def test_a_rotation_leaves_the_values_beside_it_alone(tmp_path: Path) -> None:
    ours, _, _ = an_operator_pair(model_at("llada-64", tmp_path))
    wide = torch.randn(16, 5, 64).to(BFLOAT16)
    before = wide.clone()
    ours.rotation(torch.arange(16) + 1)(wide[:, :3])
    assert torch.equal(wide[:, 3:], before[:, 3:])
    assert not torch.equal(wide[:, :3], before[:, :3])


def test_a_width_that_the_gate_s_kernel_cannot_load_stays_with_torch(tmp_path: Path) -> None:
    ours, torchs, fake = an_operator_pair(model_at("llada-64", tmp_path))
    gate, up = torch.randn(2, 100, 64).to(BFLOAT16).unbind(0)
    x = torch.randn(16, 64).to(BFLOAT16)
    assert torch.equal(ours.gate_up(gate, up)(x), torchs.gate_up(gate, up)(x))
    assert not fake.calls


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
        ("cuda", BFLOAT16, r"FlashInfer cannot be imported .*; install the extra sangam\[gpu\]"),
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


# The fake itself


def test_the_fake_appends_as_the_documentation_s_example_says() -> None:
    cache = torch.zeros(8, 2, 16, 1, 64, dtype=BFLOAT16)
    lengths = [45, 8, 25, 22]
    batch = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).int()
    positions = torch.cat([torch.arange(n) for n in lengths]).int()
    keys = torch.arange(1, 101).to(BFLOAT16).view(-1, 1, 1).repeat(1, 1, 64)
    pages = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0], dtype=torch.int32)
    indptr = torch.tensor([0, 3, 4, 6, 8], dtype=torch.int32)
    last = torch.tensor([13, 8, 9, 6], dtype=torch.int32)
    append_paged_kv_cache(keys, -keys, batch, positions, cache, pages, indptr, last)
    seen = cache[:, :, :, 0, 0].float()
    assert seen[7, 0].tolist() == list(range(1, 17))
    assert seen[5, 0].tolist() == [*range(33, 46), 0, 0, 0]
    assert seen[4, 1].tolist() == [*range(-46, -54, -1), *[0] * 8]
    assert seen[0, 0].tolist() == [*range(95, 101), *[0] * 10]


Change = Callable[[dict[str, Tensor]], None]


def take_another_page(arrays: dict[str, Tensor]) -> None:
    arrays["kv_indices"][0] = arrays["kv_indices"][3]


def drop_a_position(arrays: dict[str, Tensor]) -> None:
    arrays["last_page_len"][0] -= 1


def shift_the_queries(arrays: dict[str, Tensor]) -> None:
    arrays["qo_indptr"][1] += 1


def shift_the_pages(arrays: dict[str, Tensor]) -> None:
    arrays["kv_indptr"][1] -= 1


@pytest.mark.parametrize(
    "mistake", [take_another_page, drop_a_position, shift_the_queries, shift_the_pages]
)
def test_a_mistake_in_an_index_array_shows_in_the_fake_s_answer(mistake: Change) -> None:
    torch.manual_seed(0)
    cache, q = torch.randn(6, 2, 16, 1, 64), torch.randn(40, 2, 64)
    arrays = {
        "qo_indptr": torch.tensor([0, 32, 40]).int(),
        "kv_indptr": torch.tensor([0, 3, 6]).int(),
        "kv_indices": torch.tensor([4, 1, 0, 5, 2, 3]).int(),
        "last_page_len": torch.tensor([9, 16]).int(),
    }

    def answer() -> Tensor:
        workspace = torch.empty(16, dtype=torch.uint8)
        wrapper = FakeFlashInfer().BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa2")
        wrapper.plan(*arrays.values(), 2, 1, 64, 16, q_data_type=torch.float32)
        return wrapper.run(q, cache)

    right = answer()
    mistake(arrays)
    assert not torch.allclose(answer(), right, atol=1e-3)
