"""Bytes that settings and shapes stand for, held against passes whose tensors are counted."""

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.worker.flashinfer_fake import FakeFlashInfer
from tests.worker.flashinfer_plans import NUM_SMS
from tests.worker.harness import a_settings
from tests.worker.live_memory import LiveMemory
from tests.worker.requests import a_pass, a_plan

from sangam_core.errors import ConfigurationError
from sangam_worker.attention.flashinfer_backend import FlashInferAttention
from sangam_worker.attention.flashinfer_pool import graph_workspace_bytes, workspace_bytes
from sangam_worker.engine import Engine
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.flashinfer_operators import FlashInferOperators
from sangam_worker.models.fp8 import Fp8Rows
from sangam_worker.models.random_models import random_config
from sangam_worker.models.transformer import Transformer
from sangam_worker.plan import Plan
from sangam_worker.sampling.candidates import ROWS_AT_ONCE, Draw, Measure, propose
from sangam_worker.settings import WorkerSettings
from sangam_worker.sizing import (
    FIXED_BYTES,
    LargestIteration,
    activation_bytes,
    bytes_per_page,
    config_of,
    graph_bytes,
    largest_iteration,
    pages_on_cpu,
    pages_set,
    rotation_bytes,
    weight_bytes,
)
from sangam_worker.weights import Weights, random_weights

BFLOAT16, CPU = torch.bfloat16, torch.device("cpu")
LLADA, DREAM = (random_config(f"random:{name}") for name in ("llada-8b", "dream-7b"))


def gpu_settings(**changes: Any) -> WorkerSettings:
    return a_settings(device="cuda:0", model="random:llada-8b", **changes)


# -- pages -----------------------------------------------------------------------------------


def test_pages_may_be_set_or_left_to_the_default() -> None:
    config = random_config("random:dream-100m")
    assert pages_set(a_settings(), config) is None
    assert pages_on_cpu(a_settings(), config) == 2048
    assert pages_set(a_settings(total_pages=7), config) == 7
    assert pages_on_cpu(a_settings(total_pages=7), config) == 7


def test_pool_bytes_are_cut_down_to_whole_pages() -> None:
    config = random_config("random:dream-100m")
    page_bytes = bytes_per_page(config, "float32")
    assert pages_set(a_settings(pool_bytes=3 * page_bytes + 1), config) == 3
    assert pages_set(a_settings(pool_bytes=3 * page_bytes + 1, dtype="bfloat16"), config) == 6
    with pytest.raises(ConfigurationError, match="SANGAM_POOL_BYTES"):
        pages_set(a_settings(pool_bytes=1024), config)


@pytest.mark.parametrize("config", [LLADA, DREAM])
def test_a_page_is_as_large_as_the_pool_makes_it(config: ModelConfig) -> None:
    pool = KVPool(
        num_layers=config.num_layers,
        total_pages=1,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=BFLOAT16,
        device="meta",
    )
    assert pool.bytes_per_page == bytes_per_page(config, "bfloat16")


def test_the_limit_on_sequences_is_the_settings() -> None:
    assert config_of(gpu_settings()).max_sequence_tokens == 4096
    assert config_of(gpu_settings(max_sequence_tokens=1024)).max_sequence_tokens == 1024
    with pytest.raises(ConfigurationError, match="SANGAM_MAX_SEQUENCE_TOKENS"):
        config_of(gpu_settings(max_sequence_tokens=4097))


# -- the largest iteration --------------------------------------------------------------------


def test_the_largest_iteration_is_the_longest_sequence_and_the_largest_budget() -> None:
    largest = largest_iteration(gpu_settings(), LLADA)
    assert largest == LargestIteration(num_rows=4096 + 8192, num_head_rows=8192, num_blocks=256)
    small = largest_iteration(gpu_settings(tau_tokens_prefill=1024, max_batch_blocks=64), LLADA)
    assert small == LargestIteration(num_rows=4096 + 1024, num_head_rows=2048, num_blocks=64)


def test_a_budget_that_follows_the_queue_counts_at_its_largest() -> None:
    largest = largest_iteration(gpu_settings(admission="adaptive"), LLADA)
    assert largest.num_rows == 4096 + 4 * 8192


def test_a_budget_without_bounds_is_bounded_by_the_batch() -> None:
    largest = largest_iteration(gpu_settings(tau_tokens_prefill=2**31, max_batch_blocks=16), LLADA)
    assert largest.num_rows == 16 * 4096


# -- weights, activations, graphs --------------------------------------------------------------


@pytest.mark.parametrize(("config", "gigabytes"), [(LLADA, 16.03), (DREAM, 15.23)])
def test_weights_are_two_bytes_a_parameter(config: ModelConfig, gigabytes: float) -> None:
    assert weight_bytes(config, "bfloat16") / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert weight_bytes(config, "float32") == 2 * weight_bytes(config, "bfloat16")


@pytest.mark.parametrize("config", [LLADA, DREAM])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_weights_are_counted_as_they_are_made(config: ModelConfig, is_fp8: bool) -> None:
    weights = Weights(config, BFLOAT16, torch.device("meta"), is_fp8=is_fp8)
    made = 0
    for each in (value for group in [weights.outer, *weights.layers] for value in group.values()):
        parts = [each.values, each.scales] if isinstance(each, Fp8Rows) else [each]
        made += sum(part.nbytes for part in parts)
    assert weight_bytes(config, "bfloat16", is_fp8=is_fp8) == made


def like(config: ModelConfig, **changes: Any) -> ModelConfig:
    """A small model of the same proportions."""
    given = {"num_layers": 3, "head_dim": 64, "vocab_size": 320, "mask_id": 300, "eos_ids": ()}
    heads = {"num_heads": 4, "num_kv_heads": 4} if config.family == "llada" else {}
    heads = heads or {"num_heads": 7, "num_kv_heads": 1}
    hidden = heads["num_heads"] * 64
    mlp = round(config.mlp_size / config.hidden_size * hidden / 64) * 64
    given |= heads | {"hidden_size": hidden, "mlp_size": mlp, "max_sequence_tokens": 2048}
    return replace(config, **(given | changes))


def an_engine(config: ModelConfig, live: LiveMemory) -> Engine:
    """An engine over FlashInfer's fake, whose functions count as the kernels would."""
    fake = FakeFlashInfer()
    fake.record = lambda *args, **kwargs: None  # type: ignore[method-assign]  # it keeps tensors
    names = ("append_paged_kv_cache", "rmsnorm", "fused_add_rmsnorm", "silu_and_mul")
    for name in (*names, "apply_rope_with_cos_sin_cache_inplace"):
        setattr(fake, name, live.as_one_kernel(getattr(fake, name)))
    for kind in ("Paged", "Ragged"):
        name = f"BatchPrefillWith{kind}KVCacheWrapper"
        setattr(fake, name, partial(_opaque, getattr(fake, name), live))
    with torch.inference_mode():
        transformer = Transformer(
            config,
            random_weights(config, BFLOAT16, CPU),
            partial(FlashInferOperators, library=fake),
        )
    pool = KVPool(
        num_layers=config.num_layers,
        total_pages=256,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=BFLOAT16,
    )
    attention = FlashInferAttention(pool, config.num_heads, fake, lambda layout: "fa2")
    return Engine(config, transformer, pool, attention)


def _opaque(make: Any, live: LiveMemory, *args: Any, **kwargs: Any) -> Any:
    wrapper = make(*args, **kwargs)
    wrapper.run = live.as_one_kernel(wrapper.run)
    return wrapper


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_the_table_of_rotations_is_counted(config: ModelConfig) -> None:
    longest = replace(like(config), max_sequence_tokens=8192)  # above the first table
    with LiveMemory() as live:
        operators = FlashInferOperators(longest, BFLOAT16, CPU, FakeFlashInfer())
        operators.reserve(longest.max_sequence_tokens)
    gc.collect()
    assert 0.5 * rotation_bytes(longest) <= live.alive_bytes <= rotation_bytes(longest)


def a_wide_plan(num_decodes: int, num_prefills: int, prefill_rows: int) -> tuple[Plan, int, int]:
    """The plan, its rows and its head rows."""
    decodes = [
        a_pass(
            [5] * 64,
            name=f"d{number}",
            rows=range(32, 64),
            masked=range(32, 64),
            pages=range(4 * number, 4 * number + 4),
        )
        for number in range(num_decodes)
    ]
    num_pages = prefill_rows // 16
    prefills = [
        a_pass(
            [5] * prefill_rows,
            name=f"p{number}",
            masked=range(prefill_rows - 32, prefill_rows),
            pages=range(128 + number * num_pages, 128 + (number + 1) * num_pages),
        )
        for number in range(num_prefills)
    ]
    rows = 32 * num_decodes + prefill_rows * num_prefills
    return a_plan(*decodes, *prefills), rows, 32 * (num_decodes + num_prefills)


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
@pytest.mark.parametrize(("num_decodes", "num_prefills"), [(2, 2), (16, 1)])
def test_a_pass_takes_what_is_counted_for_its_layers(
    config: ModelConfig, num_decodes: int, num_prefills: int
) -> None:
    small = like(config)
    plan, rows, head_rows = a_wide_plan(num_decodes, num_prefills, 256)
    live = LiveMemory()
    engine = an_engine(small, live)
    with live:
        engine.forward(plan)
    iteration = LargestIteration(rows, head_rows, num_decodes + num_prefills)
    counted = activation_bytes(small, iteration, "bfloat16")
    counted -= FIXED_BYTES + rotation_bytes(small)
    assert live.peak_bytes <= counted
    assert counted <= 1.5 * live.peak_bytes


def test_a_pass_takes_what_is_counted_for_its_logits() -> None:
    small = like(LLADA, vocab_size=40000, mask_id=39999)
    plan, rows, head_rows = a_wide_plan(16, 0, 512)
    live = LiveMemory()
    engine = an_engine(small, live)
    with live:
        engine.forward(plan)
    logits = head_rows * small.vocab_size * 2
    counted = activation_bytes(small, LargestIteration(rows, head_rows, 16), "bfloat16")
    assert logits <= live.peak_bytes <= counted


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_drawing_takes_no_more_than_is_counted_however_many_rows(
    family: Any, changes: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    draw = Draw(family=family, measure=Measure.MARGIN, **(given | changes))
    logits = torch.randn((3 * ROWS_AT_ONCE, 500)).to(BFLOAT16)
    with torch.inference_mode(), LiveMemory() as live:
        propose(logits, draw, torch.arange(len(logits)), 7)
    assert live.peak_bytes <= 64 * ROWS_AT_ONCE * 500


def test_graphs_take_the_largest_bucket_s_tensors_once() -> None:
    one, all_of_them = (
        graph_bytes(LLADA, (8,), 32, "bfloat16"),
        graph_bytes(LLADA, (1, 2, 4, 8), 32, "bfloat16"),
    )
    assert one < all_of_them < one + 4 * 33 * 2**20
    assert graph_bytes(LLADA, (), 32, "bfloat16") == 0
    rows = 8 * 32
    assert one > rows * 2 * (3 * 12288 + 2 * 4096), "gate, up, their product; what is kept"
    assert one < rows * 126464 * 2 + 2**28, "no logits"


@pytest.mark.parametrize("block_tokens", [1, 8, 32, 100])
@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_graphs_count_what_fa2_asks_for_and_the_usual_workspace_lacks(
    config: ModelConfig, block_tokens: int
) -> None:
    """By FA2's own formula, as the fake of FlashInfer has it."""
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    exceeds = []
    for num_blocks in range(1, 65):
        buffers = [torch.zeros(length, dtype=torch.int32) for length in (num_blocks + 1,) * 3]
        wrapper = FakeFlashInfer().BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(16, dtype=torch.uint8),
            "NHD",
            True,
            *buffers,
            torch.zeros(num_blocks, dtype=torch.int32),
            backend="fa2",
        )
        rows = torch.arange(num_blocks + 1, dtype=torch.int32) * block_tokens
        asked_bytes, _ = wrapper.workspace_size(rows, *[rows] * 3, *heads, 16)
        counted = graph_workspace_bytes(*heads, num_blocks, block_tokens)
        assert asked_bytes <= max(counted, workspace_bytes(*heads, NUM_SMS))
        if asked_bytes > workspace_bytes(*heads, NUM_SMS):
            assert counted <= asked_bytes + 64
            exceeds.append(num_blocks)
    if block_tokens == 32:
        assert exceeds[0] == (52 if config is LLADA else 27)


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_partial_results_are_among_a_graph_s_tensors(config: ModelConfig) -> None:
    """Of blocks of one token, whose tensors are small."""
    asked_bytes = graph_workspace_bytes(
        config.num_heads, config.num_kv_heads, config.head_dim, 64, 1
    )
    assert asked_bytes > 100 * 2**20
    assert graph_bytes(config, (64,), 1, "bfloat16") > asked_bytes
