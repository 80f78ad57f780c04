"""FP8 on a CPU: how rows are rounded, and models whose layers multiply rounded ones."""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tests.worker.checkpoints import (
    DREAM,
    LLADA,
    dream_config,
    llada_config,
    random_state,
    write_checkpoint,
)
from tests.worker.dense import Dense
from tests.worker.flashinfer_fake import FakeFlashInfer
from tests.worker.fp8_kernel_checks import KERNELS, arguments_of, random_rows
from tests.worker.graph_fake import EagerCapture
from tests.worker.requests import a_pass, a_plan, random_cases
from torch import Tensor

from sangam_core.errors import ConfigurationError
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine
from sangam_worker.models.config import read_model_config
from sangam_worker.models.flashinfer_operators import FlashInferOperators
from sangam_worker.models.fp8 import LARGEST, SMALLEST, Fp8Rows, quantise
from sangam_worker.models.fp8_operators import check_cuda
from sangam_worker.models.fp8_torch import TorchFp8Kernels
from sangam_worker.models.random_models import random_config
from sangam_worker.verify import run_cases
from sangam_worker.weights import read_weights

CPU = torch.device("cpu")
ROW = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=9)


# -- rows --------------------------------------------------------------------------------------


def e4m3(x: Tensor) -> Tensor:
    """The nearest number of e4m3 by its definition, float64: 4 bits, exponents from -6."""
    exponents = torch.frexp(x)[1].clamp(min=-5)
    steps = torch.exp2(exponents.double() - 4)
    return (x / steps).round() * steps


def independent_rows(matrix: Tensor) -> Tensor:
    """What rows become, in float64."""
    scales = matrix.double().abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    return e4m3(matrix.double() / scales) * scales


@given(ROW)
def test_an_entry_moves_by_half_a_step_of_its_row_at_most(row: list[float]) -> None:
    matrix = torch.tensor([row])
    moved = (quantise(matrix).wide().double() - matrix.double()).abs()
    largest = matrix.abs().max().clamp(min=SMALLEST).double()
    steps = torch.maximum(matrix.abs().double() * 2**-3, largest / LARGEST * 2**-9)
    assert (moved <= steps / 2 * 1.001).all()


@given(ROW)
def test_rounding_again_changes_nothing(row: list[float]) -> None:
    once = quantise(torch.tensor([row]))
    again = quantise(once.wide())
    assert torch.equal(again.values.float(), once.values.float())


def test_rows_are_rounded_as_the_definition_of_e4m3_says() -> None:
    matrix = random_rows(20, 300)
    torch.testing.assert_close(
        quantise(matrix).wide().double(), independent_rows(matrix), rtol=1e-6, atol=0
    )


def test_a_matrix_is_rounded_into_memory_part_by_part() -> None:
    matrix = random_rows(2500, 20)
    rows = Fp8Rows.empty(matrix.shape, CPU)
    rows[:1500].copy_(matrix[:1500])
    rows[1500:].copy_(matrix[1500:])
    assert torch.equal(rows.wide(), quantise(matrix).wide())


def test_rows_can_be_chosen_and_joined() -> None:
    rows = quantise(random_rows(9, 20))
    chosen = torch.tensor([7, 0, 7])
    assert torch.equal(rows.index_select(0, chosen).wide(), rows.wide()[chosen])
    assert torch.equal(Fp8Rows.cat((rows[5:], rows[:5])).wide(), rows.wide().roll(4, 0))


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_the_rounded_matrices_rounded_once(has_bias: bool) -> None:
    weight, rows = quantise(random_rows(48, 100)), quantise(random_rows(32, 100, seed=1))
    bias = random_rows(1, 48, seed=2)[0] if has_bias else None
    expected = rows.wide().double() @ weight.wide().double().T
    if bias is not None:
        expected += bias.double()
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2**-8)):
        got = TorchFp8Kernels().product(weight, bias, dtype)(rows)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_what_comes_before_a_product_is_computed_and_rounded_once(
    name: str, dtype: torch.dtype
) -> None:
    arguments = arguments_of(name, 7, 100, dtype)
    wide = [each.double() if isinstance(each, Tensor) else each for each in arguments]
    if name == "add_norm":
        wide = [(wide[0] + wide[1]).to(dtype).double(), *wide[2:]]
    if name in ("norm", "add_norm"):
        x, weight, eps = wide
        expected = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    elif name == "silu_mul":
        gate, up = wide[0].chunk(2, -1)
        expected = gate / (1 + (-gate).exp()) * up
    else:
        (expected,) = wide
    got = getattr(TorchFp8Kernels(), name)(*arguments).wide().double()
    steps = torch.maximum(
        expected.abs() * 2**-3, expected.abs().amax(-1, keepdim=True) / LARGEST * 2**-9
    )
    assert ((got - expected).abs() <= steps / 2 * 1.01).all()


# -- models ------------------------------------------------------------------------------------


class Fp8Dense(Dense):
    """The dense model with every product of a layer between rounded matrices."""

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return independent_rows(x) @ independent_rows(weight).T


MODELS: dict[str, Any] = {
    "llada": llada_config(),
    "dream": dream_config(),
    "llada-wide": llada_config(
        d_model=192, n_heads=3, n_kv_heads=3, mlp_hidden_size=768, n_layers=2
    ),
    "dream-odd": dream_config(
        hidden_size=72, num_attention_heads=6, num_key_value_heads=2, intermediate_size=100
    ),
}


def an_fp8_engine(model: Path, dtype: str = "float32", total_pages: int = 160) -> Engine:
    return load_engine(str(model), dtype=dtype, total_pages=total_pages, quantization="fp8")


def random_ids(seed: str, number: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(280) for _ in range(number)]


def logits_of_a_sequence(engine: Engine, ids: list[int]) -> Tensor:
    shift = 1 if engine.model_config.family == "dream" else 0
    masked = [position + shift for position in range(len(ids) - shift)]
    return engine.forward(a_plan(a_pass(ids, masked=masked)))[: len(masked)]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_an_independent_model_of_rounded_matrices(
    name: str, tmp_path: Path
) -> None:
    """One entry of a million that float32 and float64 round to either side changes all that
    follows, by less than FP8 itself does; where none is, the two agree to float32's accuracy."""
    config: Mapping[str, Any] = MODELS[name]
    errors = []
    for seed in range(4):
        state = random_state(config, seed)
        engine = an_fp8_engine(write_checkpoint(tmp_path, config, state))
        ids = random_ids(name, 40)
        got = logits_of_a_sequence(engine, ids).double()
        expected = Fp8Dense(config, state).logits(ids, range(40))[: len(got)]
        exact = Dense(config, state).logits(ids, range(40))[: len(got)]
        of_fp8 = (expected - exact).square().mean().sqrt()
        assert 0.05 < of_fp8 / exact.std() < 0.4
        errors.append(float((got - expected).square().mean().sqrt() / of_fp8))
    assert max(errors) < 0.4
    assert min(errors) < 1e-5


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_bfloat16_beside_fp8_changes_less_than_fp8(name: str, tmp_path: Path) -> None:
    config: Mapping[str, Any] = MODELS[name]
    model = write_checkpoint(tmp_path, config)
    ids = random_ids(name, 40)
    wide, narrow = (
        logits_of_a_sequence(an_fp8_engine(model, dtype), ids) for dtype in ("float32", "bfloat16")
    )
    exact = logits_of_a_sequence(load_engine(str(model), total_pages=9), ids)
    assert narrow.dtype == torch.bfloat16
    assert 0 < (narrow - wide).square().mean() < (wide - exact).square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_a_request_gets_the_same_bytes_whatever_else_is_in_the_batch(
    name: str, tmp_path: Path
) -> None:
    """float32 on a CPU, as without FP8."""
    engine = an_fp8_engine(write_checkpoint(tmp_path, MODELS[name]))
    config = engine.model_config
    cases = random_cases(config.family, config.mask_id, 6, seed=5)
    alone = {ran.case.id: ran for case in cases for ran in run_cases([case], engine)}
    together = run_cases(cases, engine, in_flight=6, tau_tokens=200)
    assert {ran.case.id: ran for ran in together} == alone


def test_flashinfer_rotates_and_norms_for_the_head_as_without_fp8(tmp_path: Path) -> None:
    """Over a fake of the library, which rounds where FlashInfer does."""
    config = llada_config(d_model=128, n_heads=2, n_kv_heads=2, mlp_hidden_size=192)
    model, fake = str(write_checkpoint(tmp_path, config)), FakeFlashInfer()
    ids = random_ids("flashinfer", 40)
    exact = logits_of_a_sequence(load_engine(model, total_pages=9), ids)
    near = logits_of_a_sequence(an_fp8_engine(Path(model), "bfloat16"), ids)
    engine = load_engine(
        model,
        total_pages=9,
        dtype="bfloat16",
        quantization="fp8",
        operators=lambda *args: FlashInferOperators(*args, fake),
    )
    got = logits_of_a_sequence(engine, ids)
    of_fp8 = (near - exact).square().mean()
    assert 0 < (got - near).square().mean() < of_fp8
    assert (got - exact).square().mean() < 1.5 * of_fp8


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_a_captured_pass_gives_what_an_eager_one_does(name: str, tmp_path: Path) -> None:
    engine = load_engine(
        str(write_checkpoint(tmp_path, MODELS[name])),
        total_pages=12,
        quantization="fp8",
        graph_buckets=(1, 2),
        graph_block_tokens=8,
    )
    engine.capture_graphs(capture=EagerCapture())
    ids, block = random_ids(name, 40), range(16, 24)
    given: dict[str, Any] = {"block": block, "masked": list(block), "pages": (3, 0, 7)}
    engine.execute(a_plan(a_pass(ids, **given)))
    decode = a_plan(a_pass(ids, rows=block, **given))
    eager, replayed = engine.forward(decode), engine.replay(decode)
    assert replayed is not None
    torch.testing.assert_close(replayed, eager[: len(replayed)], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model", [LLADA, DREAM], ids=["llada", "dream"])
def test_the_matrices_of_layers_and_nothing_else_are_kept_in_8_bits(model: Path) -> None:
    config = read_model_config(model)
    weights = read_weights(model, config, torch.bfloat16, CPU, is_fp8=True)
    plain = read_weights(model, config, torch.bfloat16, CPU)
    dtypes = {name: tensor.dtype for name, tensor in weights.outer.items()}
    assert dtypes == dict.fromkeys(plain.outer, torch.bfloat16)
    for layer, expected in zip(weights.layers, plain.layers, strict=True):
        assert layer.keys() == expected.keys()
        for name, parameter in layer.items():
            assert isinstance(parameter, Fp8Rows) == (expected[name].dim() == 2)
            if isinstance(parameter, Fp8Rows):
                assert parameter.values.shape == expected[name].shape
                assert torch.allclose(
                    parameter.wide(), expected[name].float(), rtol=0.08, atol=1e-3
                )


def test_a_row_that_is_no_number_fails_its_pass_and_no_other(tmp_path: Path) -> None:
    """A token whose embedding is no number stands for whatever overflows inside a model."""
    config = llada_config()
    state = random_state(config)
    state["model.transformer.wte.weight"][7, 0] = torch.nan
    engine = an_fp8_engine(write_checkpoint(tmp_path, config, state))
    broken = a_pass([7] * 20, name="broken", masked=[3])
    sound = a_pass([5] * 20, name="sound", masked=[3])
    outcome = engine.execute(a_plan(broken, sound))
    assert [item.error is None for item in outcome.passes] == [False, True]
    assert outcome.passes[1] == engine.execute(a_plan(sound)).passes[0]


# -- where it can run --------------------------------------------------------------------------


def test_an_unknown_quantization_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="quantization 'int4' is unknown; use one of none"):
        load_engine("small", total_pages=1, quantization="int4")


@pytest.mark.parametrize("name", ["llada-8b", "dream-7b"])
def test_the_published_models_run_on_ada_and_hopper(name: str) -> None:
    for capability in ((8, 9), (9, 0), (10, 0)):
        check_cuda(random_config(f"random:{name}"), torch.bfloat16, capability)


def test_what_a_gpu_cannot_multiply_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = random_config("random:llada-8b")
    with pytest.raises(ConfigurationError, match=r"compute capability 8\.9 or newer.*not 8\.0"):
        check_cuda(config, torch.bfloat16, (8, 0))
    with pytest.raises(ConfigurationError, match="needs dtype bfloat16, not float32"):
        check_cuda(config, torch.float32, (9, 0))
    odd = read_model_config(write_checkpoint(tmp_path, MODELS["dream-odd"]))
    with pytest.raises(ConfigurationError, match=r"multiples of 16, but the hidden size .* is 72"):
        check_cuda(odd, torch.bfloat16, (9, 0))
