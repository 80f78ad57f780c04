"""FlashInfer on a real GPU: what ``tests/worker/test_flashinfer_backend.py`` checks on a fake.

Results in bfloat16 are held against float64, within what rounding explains if sums are kept in
float32. Kernels that are not there yet are compiled first, which takes minutes.
"""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.gpu.engines import model_at
from tests.gpu.marks import FLASHINFER_ON_A_GPU
from tests.gpu.shapes import KERNELS, SHAPES, skip_without
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
from tests.worker.engine_checks import MODELS
from tests.worker.requests import a_pass, a_plan
from torch import Tensor

from sangam_worker.attention.flashinfer_backend import FlashInferAttention, flashinfer_attention
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.flashinfer_operators import FlashInferOperators, flashinfer_operators
from sangam_worker.models.linear import PlainLinear
from sangam_worker.models.operators import TorchOperators
from sangam_worker.models.random_models import random_config
from sangam_worker.packing import pack

pytestmark = FLASHINFER_ON_A_GPU

BFLOAT16 = torch.bfloat16
UNIT = torch.finfo(BFLOAT16).eps / 2


def a_backend(shape: str, kernel: str, total_pages: int = 60) -> tuple[FlashInferAttention, KVPool]:
    skip_without(kernel)
    num_heads, num_kv_heads, head_dim = SHAPES[shape]
    pool = a_pool(num_kv_heads, head_dim, total_pages=total_pages, dtype=BFLOAT16, device="cuda")
    return flashinfer_attention(pool, num_heads, kernel), pool


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_sequence_attends_to_itself_and_nothing_else(shape: str, kernel: str) -> None:
    backend, pool = a_backend(shape, kernel)
    for seed in range(12):
        torch.manual_seed(seed)
        pool.layers[1].fill_(torch.nan)
        sequences = random_sequences(Random(seed), pool)
        wanted = pages_after(sequences, pool.layers[1])
        queries = random_queries(sequences, SHAPES[shape][0], pool)
        heads = of_masked(queries, sequences)
        backend.plan(pack([each.item for each in sequences], "llada").layout)

        out = backend.run(packed(queries), *new_sides(sequences), 1)
        chosen = backend.run(packed(heads), *new_sides(sequences), 1, head_rows_only=True)

        assert is_within_rounding(out, *expected(queries, sequences)), seed
        assert is_within_rounding(chosen, *expected(heads, sequences)), seed
        assert torch.equal(pool.layers[1].nan_to_num(9.0), wanted.nan_to_num(9.0))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", ["llada-8b", "dream-7b"])
@pytest.mark.parametrize(("num_blocks", "context", "prefill"), [(1, 2048, 0), (24, 1024, 777)])
def test_long_contexts_and_mixed_batches_stay_within_rounding(
    shape: str, kernel: str, num_blocks: int, context: int, prefill: int
) -> None:
    torch.manual_seed(0)
    per_sequence = -(-context // 16)
    total_pages = num_blocks * per_sequence + -(-prefill // 16)
    backend, pool = a_backend(shape, kernel, total_pages)
    pages = Random(0).sample(range(total_pages), total_pages)
    passes = []
    for number in range(num_blocks):
        start = 32 * Random(number).randrange(context // 32)
        own = tuple(pages.pop() for _ in range(per_sequence))
        rows = range(start, start + 32)
        name = str(number)
        passes.append(a_pass([1] * context, name=name, rows=rows, pages=own, masked=rows[::5]))
    if prefill:
        passes.append(a_pass([1] * prefill, pages=tuple(pages), masked=range(700, 732)))
    sequences = [a_sequence(item, pool) for item in passes]
    queries = random_queries(sequences, SHAPES[shape][0], pool)
    heads = of_masked(queries, sequences)
    backend.plan(pack(passes, "llada").layout)
    out = backend.run(packed(queries), *new_sides(sequences), 1)
    chosen = backend.run(packed(heads), *new_sides(sequences), 1, head_rows_only=True)
    assert is_within_rounding(out, *expected(queries, sequences))
    assert is_within_rounding(chosen, *expected(heads, sequences))


def test_a_plan_may_follow_while_the_passes_before_it_still_run() -> None:
    torch.manual_seed(0)
    backend, pool = a_backend("llada-8b", "fa2")
    batches = []
    for number in range(8):
        pages = tuple(Random(number).sample(range(7 * number, 7 * number + 7), 7))
        item = a_pass([1] * (97 + number), rows=range(32, 64), pages=pages, masked=range(32, 40))
        batches.append([a_sequence(item, pool)])
    busy = torch.randn(4096, 4096, device="cuda").to(BFLOAT16)
    answers = []
    for sequences in batches:
        queries = random_queries(sequences, 32, pool)
        for _ in range(20):  # the device falls behind the host
            busy = (busy @ busy).div_(64)
        backend.plan(pack([each.item for each in sequences], "llada").layout)
        answers.append((queries, backend.run(packed(queries), *new_sides(sequences), 1)))
    for sequences, (queries, out) in zip(batches, answers, strict=True):
        assert is_within_rounding(out, *expected(queries, sequences))


# Operators


def operators(name: str) -> tuple[FlashInferOperators, TorchOperators]:
    config, device = random_config(f"random:{name}"), torch.device("cuda")
    return flashinfer_operators(config, BFLOAT16, device), TorchOperators(config, BFLOAT16, device)


def on_gpu(*shape: int) -> Tensor:
    return torch.randn(shape).to("cuda", BFLOAT16)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def is_rounded(ours: Tensor, exact: Tensor, num_roundings: float) -> bool:
    """Whether a result is off by few roundings of its own size, in bfloat16."""
    bound = num_roundings * UNIT * exact.abs() + 1e-5
    return bool(((ours.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("name", ["llada-8b", "dream-7b"])
@pytest.mark.parametrize("num_rows", [16, 32, 1040])
def test_norms_round_once(name: str, num_rows: int) -> None:
    torch.manual_seed(0)
    ours, _ = operators(name)
    config = random_config(f"random:{name}")
    width = config.hidden_size
    x, weight = on_gpu(num_rows, width), on_gpu(width)
    assert is_rounded(ours.norm(x, weight), exact_norm(x, weight, config.norm_eps), 1.1)

    inputs, product = on_gpu(num_rows, 64), PlainLinear(on_gpu(width, 64), None)
    added = product(inputs).double() + x.double()
    summed, normed = ours.add_norm(product, inputs, x.clone(), weight)
    assert is_rounded(summed, added, 1.1)
    assert is_rounded(normed, exact_norm(added, weight, config.norm_eps), 1.1)


@pytest.mark.parametrize("name", ["llada-8b", "dream-7b"])
def test_gate_and_up_are_one_product_and_one_rounding(name: str) -> None:
    torch.manual_seed(0)
    ours, _ = operators(name)
    width = random_config(f"random:{name}").mlp_size
    gate, up, x = on_gpu(width, 64) / 8, on_gpu(width, 64) / 8, on_gpu(48, 64)
    products = PlainLinear(torch.cat((gate, up)), None)(x).double()
    a, b = products.chunk(2, -1)
    assert is_rounded(ours.gate_up(gate, up)(x), a * a.sigmoid() * b, 1.5)


@pytest.mark.parametrize("name", ["llada-8b", "dream-7b"])
@pytest.mark.parametrize("num_heads", [1, 4, 36])
def test_rotations_agree_with_torch_s_at_any_position(name: str, num_heads: int) -> None:
    torch.manual_seed(0)
    ours, torchs = operators(name)
    for each in (ours, torchs):
        each.reserve(9000)
    wide = on_gpu(64, num_heads + 2, 128)
    positions = torch.arange(64, device="cuda") * 131
    rows = torch.tensor([5, 63, 0], device="cuda")
    kept = wide.clone()
    wanted = torchs.rotation(positions)(wide[:, :num_heads].clone())
    turned = ours.rotation(positions)(wide[:, :num_heads])
    size = kept[:, :num_heads].float().abs()
    size = size + size.roll(64, -1)  # of the two terms of each sum
    assert ((turned.float() - wanted.float()).abs() <= 4 * UNIT * size).all()
    assert torch.equal(wide[:, num_heads:], kept[:, num_heads:])
    chosen = ours.rotation(positions).select(rows)(kept[rows][:, :num_heads])
    assert torch.equal(chosen, turned[rows])


# Whole models


def some_logits(engine: Engine) -> list[Tensor]:
    """A prefill and a request without a cache, then a decode on the prefill's pages."""
    random = Random(1)
    ids = [random.randrange(280) for _ in range(60)]
    pages = (7, 3, 11, 0)
    prefill = a_pass(ids, pages=pages, masked=range(40, 48))
    alone = a_pass(ids[:21], name="b", masked=[2, 20])
    decode = a_pass(ids, rows=range(40, 48), pages=pages, masked=range(40, 48))
    return [
        engine.forward(a_plan(alone, prefill))[:10].float().cpu(),
        engine.forward(a_plan(decode))[:8].float().cpu(),
    ]


@pytest.mark.parametrize("attention", ["flashinfer", "flashinfer-fa2"])
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_is_as_near_to_float32_as_with_torch_in_bfloat16(
    name: str, attention: str, tmp_path: Path
) -> None:
    model = model_at(name, tmp_path)
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "total_pages": 40}
    exact = some_logits(load_engine(str(model), total_pages=40))
    plain = some_logits(load_engine(str(model), **options))
    fused = some_logits(
        load_engine(str(model), **options, attention=attention, operators="flashinfer")
    )
    for wanted, torchs, ours in zip(exact, plain, fused, strict=True):
        error, allowed = ((each - wanted).square().mean().sqrt() for each in (ours, torchs))
        assert error <= 1.5 * allowed
