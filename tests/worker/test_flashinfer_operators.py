"""Engines and operators on FlashInfer: on a fake of its semantics, and by its signatures."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.worker.checkpoints import DREAM, LLADA, dream_config, llada_config, write_checkpoint
from tests.worker.flashinfer_fake import SIGNATURES, FakeFlashInfer
from tests.worker.flashinfer_installed import installed_signatures, run_with_flashinfer
from tests.worker.graph_fake import EagerCapture
from tests.worker.requests import a_pass, a_plan
from torch import Tensor

from sangam_worker.attention.flashinfer_backend import FlashInferAttention
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine
from sangam_worker.models.config import read_model_config
from sangam_worker.models.flashinfer_operators import FlashInferOperators
from sangam_worker.models.linear import PlainLinear
from sangam_worker.models.operators import TorchOperators

BFLOAT16 = torch.bfloat16
CPU = torch.device("cpu")
UNIT = torch.finfo(BFLOAT16).eps / 2


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
