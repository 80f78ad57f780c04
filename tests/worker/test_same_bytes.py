"""float32 on a CPU: what a request gives, bit for bit, whatever else is in the batch."""

import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.worker.checkpoints import (
    DREAM,
    LLADA,
    an_engine,
    dream_config,
    llada_config,
    write_checkpoint,
)
from tests.worker.requests import a_pass, a_plan, random_cases

from sangam_worker.engine import Engine
from sangam_worker.models.linear import MIN_ROWS, PackedLinear, PlainLinear
from sangam_worker.plan import Pass
from sangam_worker.verify import Ran, run_cases

MODELS: dict[str, Any] = {
    "llada": LLADA,
    "dream": DREAM,
    "llada-wide": llada_config(
        d_model=192, n_heads=3, n_kv_heads=3, mlp_hidden_size=768, n_layers=2
    ),
    "dream-odd": dream_config(
        hidden_size=72, num_attention_heads=6, num_key_value_heads=2, intermediate_size=100
    ),
}


def the_engine(name: str, at: Path, total_pages: int = 160) -> Engine:
    model = MODELS[name]
    if isinstance(model, dict):
        model = write_checkpoint(at, model)
    return an_engine(model, total_pages=total_pages)


def by_name(ran: list[Ran]) -> dict[str, Ran]:
    return {item.case.id: item for item in ran}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_passes_and_confidences_do_not_depend_on_the_batch_or_the_placement(
    name: str, tmp_path: Path
) -> None:
    engine, second = the_engine(name, tmp_path), the_engine(name, tmp_path)
    config = engine.model_config
    cases = random_cases(config.family, config.mask_id, 24, seed=5)
    alone = by_name([ran for case in cases for ran in run_cases([case], engine)])
    assert len(alone) == len(cases)
    for seed, in_flight, engines in (
        (1, 12, [engine]),
        (2, 20, [engine]),
        (3, 9, [engine, second]),
    ):
        order = Random(seed).sample(cases, len(cases))
        together = by_name(list(run_cases(order, *engines, in_flight=in_flight, tau_tokens=200)))
        for case in cases:
            # Scores are float64, compared exactly: one bit in a logit would show.
            assert together[case.id] == alone[case.id]


def random_pass(name: str, random: Random, first_page: int) -> Pass:
    """A whole sequence or a block on pages of its own."""
    length = random.randint(1, 90)
    ids = [random.randrange(280) for _ in range(length)]
    start = random.randrange(length)
    rows = range(length) if random.random() < 0.4 else range(start, min(length, start + 8))
    masked = sorted(random.sample(rows, random.randint(0, min(5, len(rows)))))
    pages = tuple(range(first_page, first_page + 6)) if len(rows) < length or start % 2 else ()
    return a_pass(ids, name=name, rows=rows, masked=masked, pages=pages)


def cuts(passes: list[Pass]) -> list[int]:
    """Head rows of each pass, then the padding."""
    counts = [len(item.masked) for item in passes]
    return [*counts, -sum(counts) % MIN_ROWS]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_same_bits_alone_and_packed_with_others(name: str, tmp_path: Path) -> None:
    engine = the_engine(name, tmp_path)
    for layer in engine.kv_pool.layers:
        torch.manual_seed(len(layer))
        layer.normal_()
    kept = [layer.clone() for layer in engine.kv_pool.layers]
    random = Random(11)
    for _ in range(12):
        count = random.choice([2, 3, 9, 20])
        passes = [random_pass(str(n), random, 6 * n) for n in range(count)]
        together = engine.forward(a_plan(*passes)).split(cuts(passes))
        for item, packed in zip(passes, together, strict=False):
            for layer, before in zip(engine.kv_pool.layers, kept, strict=True):
                layer.copy_(before)
            alone = engine.forward(a_plan(item))[: len(item.masked)]
            assert torch.equal(alone, packed)
        for layer, before in zip(engine.kv_pool.layers, kept, strict=True):
            layer.copy_(before)


SHAPES = [(64, 160), (192, 576), (512, 192), (176, 64), (768, 768), (100, 34), (768, 2048)]


@pytest.mark.parametrize("kind", [PackedLinear, PlainLinear])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_products_rows_do_not_depend_on_their_number_or_place(
    kind: type[PackedLinear | PlainLinear], shape: tuple[int, int]
) -> None:
    torch.set_num_threads(1)
    width_in, width_out = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(640, width_in, generator=generator)
    other = torch.randn(640, width_out, generator=generator)
    product = kind(
        torch.randn(width_out, width_in, generator=generator),
        torch.randn(width_out, generator=generator),
    )
    whole = [product(x), product.silu(x), product.times(x, other), product.plus(x, other)]
    for num_rows in (16, 32, 48, 80, 112, 256, 400):
        for start in (0, 5, 33, 240):
            cut = slice(start, start + num_rows)
            rows, others = x[cut].clone(), other[cut].clone()
            parts = [
                product(rows),
                product.silu(rows),
                product.times(rows, others),
                product.plus(rows, others),
            ]
            for part, all_rows in zip(parts, whole, strict=True):
                assert torch.equal(part, all_rows[cut])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_products_compute_the_same(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(shape[1], shape[0], generator=generator) / shape[0] ** 0.5
    bias = torch.randn(shape[1], generator=generator)
    x = torch.randn(32, shape[0], generator=generator)
    other = torch.randn(32, shape[1], generator=generator)
    expected = F.linear(x.double(), weight.double(), bias.double())
    for kind in (PackedLinear, PlainLinear):
        product = kind(weight.clone(), bias.clone())
        assert torch.allclose(product(x).double(), expected, atol=1e-5)
        assert torch.allclose(product.silu(x).double(), F.silu(expected), atol=1e-5)
        assert torch.allclose(product.times(x, other).double(), expected * other, atol=1e-5)
        assert torch.allclose(product.plus(x, other).double(), expected + other, atol=1e-5)


def test_an_iteration_uses_one_thread_whichever_thread_calls_it() -> None:
    engine = an_engine(LLADA)
    seen = []

    def run() -> None:
        torch.set_num_threads(2)
        engine.execute(a_plan(a_pass([5] * 20, masked=[3])))
        seen.append(torch.get_num_threads())

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert seen == [1, 1]
