"""FP8 on a real GPU: kernels, products and whole passes against the reference of a CPU."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.gpu.marks import SECONDS
from tests.worker.checkpoints import dream_config, llada_config, write_checkpoint
from tests.worker.fp8_kernel_checks import CHECKS, KERNELS, Run, arguments_of, compare, random_rows
from tests.worker.requests import a_pass, a_plan
from torch import Tensor

from sangam_core.errors import ConfigurationError
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine
from sangam_worker.models.fp8 import Fp8Rows, quantise
from sangam_worker.models.fp8_torch import WideProduct
from sangam_worker.plan import Pass

CAN_MULTIPLY = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)

pytestmark = [
    pytest.mark.skipif(not CAN_MULTIPLY, reason="needs a GPU that multiplies e4m3"),
    pytest.mark.timeout(SECONDS),
    pytest.mark.filterwarnings("default"),  # of FlashInfer's and its compiler's, not ours
]
needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="needs the extra gpu"
)

BFLOAT16 = torch.bfloat16
PRODUCTS = {
    "llada-8b qkv": (4096, 12288, False),
    "llada-8b out": (4096, 4096, False),
    "llada-8b gate, up": (4096, 24576, False),
    "llada-8b down": (12288, 4096, False),
    "dream-7b qkv": (3584, 4608, True),
    "dream-7b kv": (3584, 1024, True),
    "dream-7b gate, up": (3584, 37888, False),
    "dream-7b down": (18944, 3584, False),
    "tiny": (64, 48, True),
}
"""Widths in and out, and whether there is a bias."""


def on(device: str, value: Any) -> Any:
    if isinstance(value, Fp8Rows):
        return Fp8Rows(on(device, value.values), on(device, value.scales))
    return value.to(device) if isinstance(value, Tensor) else value


def run_on_gpu(name: str, arguments: tuple[Any, ...]) -> tuple[Fp8Rows, tuple[Any, ...]]:
    from sangam_worker.models.fp8_triton import TritonFp8Kernels

    moved = tuple(on("cuda", each) for each in arguments)
    rows = getattr(TritonFp8Kernels(), name)(*moved)
    return on("cpu", rows), tuple(on("cpu", each) for each in moved)


# -- kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_kernels_on_a_gpu_give(check: Callable[[Run], None]) -> None:
    check(run_on_gpu)


@pytest.mark.parametrize("width", [3584, 4096, 12288, 18944])
@pytest.mark.parametrize("name", KERNELS)
def test_rows_as_wide_as_the_models(name: str, width: int) -> None:
    for num_rows in (1, 33, 700):
        compare(run_on_gpu, name, arguments_of(name, num_rows, width, BFLOAT16))


# -- products ----------------------------------------------------------------------------------


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_are_the_references_but_for_their_sums(product: str) -> None:
    """Sums in the tensor cores keep some 14 bits; what e4m3 itself changes is 5 percent."""
    from sangam_worker.models.fp8_triton import ScaledProduct

    width_in, width_out, has_bias = PRODUCTS[product]
    weight = quantise(torch.randn(width_out, width_in) / width_in**0.5)
    bias = torch.randn(width_out).to(BFLOAT16) if has_bias else None
    wide = WideProduct(weight, bias, torch.float32)
    scaled = ScaledProduct(on("cuda", weight), on("cuda", bias), BFLOAT16)
    for num_rows in (16, 32, 48, 272):
        rows = quantise(torch.randn(num_rows, width_in))
        got, expected = scaled(on("cuda", rows)).float().cpu(), wide(rows)
        error = (got - expected).square().mean().sqrt() / expected.std()
        assert error < 0.02


def test_a_row_that_is_no_number_spoils_its_own_results_alone() -> None:
    from sangam_worker.models.fp8_triton import ScaledProduct, TritonFp8Kernels

    x = random_rows(32, 256).to(BFLOAT16)
    x[5, 17], x[9, 0] = torch.nan, torch.inf
    weight = on("cuda", quantise(random_rows(64, 256, seed=1)))
    got = ScaledProduct(weight, None, BFLOAT16)(TritonFp8Kernels().quantise(x.cuda()))
    is_number = torch.ones(32, dtype=torch.bool)
    is_number[[5, 9]] = False
    assert torch.equal(got.isfinite().all(1).cpu(), is_number)
    assert got[5].isnan().all()
    assert got[9].isnan().all()


# -- engines -----------------------------------------------------------------------------------

MODELS: dict[str, Any] = {
    "llada": llada_config(d_model=128, n_heads=2, n_kv_heads=2, mlp_hidden_size=192),
    "dream": dream_config(
        hidden_size=192, num_attention_heads=3, num_key_value_heads=1, intermediate_size=128
    ),
}


def sequences(engine: Engine, number: int, length: int = 96) -> list[Pass]:
    """Whole sequences, a third of each masked."""
    random, mask_id = Random(0), engine.model_config.mask_id
    passes = []
    for each in range(number):
        masked = sorted(random.sample(range(1, length), length // 3))
        ids = [mask_id if at in masked else random.randrange(200) for at in range(length)]
        pages = range(each * length // 16, (each + 1) * length // 16)
        passes.append(a_pass(ids, name=str(each), masked=masked, pages=tuple(pages)))
    return passes


def decode_of(prefill: Pass) -> Pass:
    """Its second block."""
    block = range(32, 64)
    return a_pass(
        list(prefill.tokens),
        name=prefill.key.request_id,
        rows=block,
        block=block,
        masked=[at for at in prefill.masked if at in block],
        pages=prefill.pages,
    )


def error_of(logits: Tensor, exact: Tensor) -> float:
    """Root mean square."""
    return float((logits.float().cpu() - exact.float().cpu()).square().mean().sqrt())


@pytest.mark.parametrize("library", ["torch", pytest.param("flashinfer", marks=needs_flashinfer)])
@pytest.mark.parametrize("name", MODELS)
def test_a_pass_is_as_near_to_float32_as_the_references(
    name: str, library: str, tmp_path: Path
) -> None:
    model = str(write_checkpoint(tmp_path, MODELS[name]))
    exact = load_engine(model, total_pages=40)
    reference = load_engine(model, total_pages=40, dtype="bfloat16", quantization="fp8")
    engine = load_engine(
        model,
        total_pages=40,
        dtype="bfloat16",
        device="cuda",
        attention=library,
        operators=library,
        quantization="fp8",
    )
    plan = a_plan(*sequences(engine, 4))
    num_rows = sum(len(item.masked) for item in plan.passes)
    wanted, near, got = (
        each.forward(plan)[:num_rows].float().cpu() for each in (exact, reference, engine)
    )
    expected_error = error_of(near, wanted)
    assert 0 < error_of(got, wanted) < 1.3 * expected_error
    assert error_of(got, near) < 1.2 * expected_error


@needs_flashinfer
@pytest.mark.parametrize("name", MODELS)
def test_replays_are_as_near_to_float32_as_eager_passes(name: str, tmp_path: Path) -> None:
    """No nearer to each other: a rounding that falls the other way moves all that follows."""
    model = str(write_checkpoint(tmp_path, MODELS[name]))
    exact = load_engine(model, total_pages=60)
    engine = load_engine(
        model,
        total_pages=60,
        dtype="bfloat16",
        device="cuda",
        attention="flashinfer",
        operators="flashinfer",
        quantization="fp8",
        graph_buckets=(1, 2, 4),
    )
    engine.capture_graphs(is_measured=False)
    prefills = sequences(engine, 4)
    for each in (engine, exact):
        each.execute(a_plan(*prefills))
    decodes = [decode_of(item) for item in prefills]
    for passes in (decodes, decodes[:1], decodes[1:3]):
        plan = a_plan(*passes)
        replayed = engine.replay(plan)
        assert replayed is not None
        wanted = exact.forward(plan)[: len(replayed)]
        eager = engine.forward(plan)[: len(replayed)]
        assert error_of(replayed, wanted) < 1.3 * error_of(eager, wanted)


def test_a_large_model_is_rounded_as_it_is_read() -> None:
    """LLaDA-8B's layers in 8 bits, 7.0 GB, and a matrix beside them, never the 16 GB of bf16."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = load_engine(
        "random:llada-8b", total_pages=8, dtype="bfloat16", device="cuda", quantization="fp8"
    )
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    assert 9.0e9 < kept < 9.4e9
    assert peak - kept < 1.3e9  # the embedding, as it is drawn
    del engine


def test_a_model_that_a_gpu_cannot_multiply_is_refused_before_it_is_read(tmp_path: Path) -> None:
    odd = dream_config(
        hidden_size=72, num_attention_heads=6, num_key_value_heads=2, intermediate_size=100
    )
    model = str(write_checkpoint(tmp_path, odd))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="multiples of 16"):
        load_engine(model, total_pages=1, dtype="bfloat16", device="cuda", quantization="fp8")
