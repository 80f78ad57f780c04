"""Times single operators: matrix products (bf16, FP8), the sampler, attention by backend.

Decides their sizes from a model's shape. Called by the parts; what they find feeds the cost model
(``products.csv``) and the choice of an attention backend (``attention.csv``).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.ceilings import fp8_product
from benchmarks.gpu.one_pass import plan_of
from benchmarks.gpu.parts import Budget, Record, say
from benchmarks.gpu.timing import cold_seconds, device_seconds, random_matrix
from benchmarks.iterations import BLOCK_LENGTH, Iteration
from sangam_loadtest.costs.gpus import Gpu
from sangam_loadtest.costs.shapes import ModelShape
from sangam_worker.attention.protocol import Attention, AttentionBackend
from sangam_worker.engine_loading import ATTENTION_BACKENDS
from sangam_worker.graphs.static_batch import StaticBatch, layout_key
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.description import ModelConfig
from sangam_worker.packing import pack
from sangam_worker.sampling.candidates import Draw, Measure, propose
from sangam_worker.sampling.greedy import greedy_kernel

Run = Callable[[], object]

_POOL_LAYERS = 4
"""Layers of the pool in which attention is timed, one after the other."""

_CHOOSING_REPEATS = 3
"""Of each tiling, of which there are up to 8: the fastest is then timed like everything else."""


def time_products(
    record: Record,
    budget: Budget,
    name: str,
    shape: ModelShape,
    rows: Sequence[int],
    device: torch.device,
) -> None:
    """A line for each number of rows: all layers' products and the head, in milliseconds."""
    lines: list[dict[str, Any]] = record.setdefault("lines", [])
    hidden, query = shape.hidden_size, shape.query_size
    sizes = (
        (hidden, query + shape.key_value_size),
        (query, hidden),
        (hidden, 2 * shape.intermediate_size),
        (shape.intermediate_size, hidden),
    )
    weights = [random_matrix(n, k, device, torch.bfloat16) for k, n in sizes]
    head = random_matrix(shape.vocab_size, hidden, device, torch.bfloat16)
    for number, count in enumerate(rows):
        if budget.left_seconds <= 0:
            record["cut_short"] = list(rows[number:])
            return
        inputs = [random_matrix(count, k, device, torch.bfloat16) for k, _ in sizes]
        # One after the other, as in a layer: no weight is left in the cache when its turn comes.
        bf16 = device_seconds(_in_turn([*map(_bf16_product, inputs, weights)]), device)
        fp8 = _fp8_seconds(record, inputs, weights, device)
        line = {
            "model": name,
            "rows": count,
            "bf16_ms": 1000 * shape.num_layers * bf16,
            "fp8_ms": None if fp8 is None else 1000 * shape.num_layers * fp8,
            "head_bf16_ms": 1000 * device_seconds(_bf16_product(inputs[0], head), device),
        }
        lines.append(line)
        say(f"         {line}")


def _fp8_seconds(
    record: Record,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    device: torch.device,
) -> float | None:
    """``None``, with torch's words in the record, where it has no such products."""
    try:
        return device_seconds(_in_turn([*map(fp8_product, inputs, weights)]), device)
    except RuntimeError as error:
        record["fp8_error"] = str(error)[:300]
        return None


def _bf16_product(inputs: torch.Tensor, weight: torch.Tensor) -> Run:
    return lambda: torch.mm(inputs, weight.t())


def _in_turn(runs: Sequence[Run]) -> Run:
    def run() -> None:
        for each in runs:
            each()

    return run


def time_sampler(
    record: Record,
    name: str,
    config: ModelConfig,
    rows: Sequence[int],
    device: torch.device,
    gpu: Gpu,
) -> None:
    """Milliseconds to read so many rows of logits: the kernel, or torch's operators on a CPU.

    Again and again the same ones: few rows are read from the cache, as in a pass, where the head
    has just written them; a thousand do not fit there.
    """
    dtype = torch.bfloat16
    kernel = greedy_kernel(config, dtype, device)
    lines: list[dict[str, Any]] = record.setdefault("lines", [])
    draw = Draw(config.family, 0.0, 1.0, 0, Measure.PROBABILITY)
    no_keys = torch.zeros(0, dtype=torch.int64, device=device)
    for count in rows:
        logits = random_matrix(count, config.vocab_size, device, dtype)
        run: Run = partial(propose, logits, draw, no_keys, config.mask_id)
        if kernel is not None:
            run = partial(kernel, logits, config.mask_id, 2)
        floor = 1000 * logits.nbytes / gpu.bytes_per_second
        line = {
            "model": name,
            "rows": count,
            "ms": 1000 * device_seconds(run, device, num_inner=10),
            "floor_ms": floor,
            "is_kernel": kernel is not None,
        }
        lines.append(line)
        say(f"         {line}")


def time_attention(
    record: Record,
    budget: Budget,
    name: str,
    config: ModelConfig,
    iterations: Sequence[Iteration],
    kernels: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Attention of all layers by backend, planning left out; and which one each batch is for.

    Beside them, for decodes alone, the fastest tiling of our own kernel, as graphs have it.

    Each call finds nothing of its keys in the cache: in a pass a layer's weights come between.
    """
    lines: list[dict[str, Any]] = record.setdefault("lines", [])
    pool = KVPool(
        num_layers=_POOL_LAYERS,
        total_pages=max(each.num_pages for each in iterations),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )
    for layer in pool.layers:
        layer.normal_()
    backends = {each: ATTENTION_BACKENDS[each](pool, config.num_heads) for each in kernels}
    own = None
    if device.type == "cuda":
        own = ATTENTION_BACKENDS["flashinfer-fa2-blocks"](pool, config.num_heads)
    for number, iteration in enumerate(iterations):
        if budget.left_seconds <= 0:
            record["cut_short"] = [str(each) for each in iterations[number:]]
            return
        seen = {
            f"{kernel}_ms": 1000
            * config.num_layers
            * _attention_seconds(each, pool, config, iteration)
            for kernel, each in backends.items()
        }
        blocks = None
        if isinstance(own, AttentionBackend) and not iteration.prefill_tokens:
            blocks, seconds = best_tiling(own, pool, config, iteration)
            seen["blocks_ms"] = 1000 * config.num_layers * seconds
        line = {
            "model": name,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "prefill_tokens": iteration.prefill_tokens,
            "decode_blocks": iteration.decode_blocks,
            "context_tokens": iteration.context_tokens,
            "blocks_ms": None,
            **seen,
            "tiling": blocks,
            "fastest": min(seen, key=lambda each: seen[each]).removesuffix("_ms"),
        }
        lines.append(line)
        say(f"         {line}")


def best_tiling(
    backend: AttentionBackend, pool: KVPool, config: ModelConfig, iteration: Iteration
) -> tuple[str, float]:
    """The fastest tiling of our own kernel, and what it takes in one layer.

    Keys and values are put on their pages as well, as the other backends' times have it.
    """
    plan = plan_of(iteration, config, pool.total_pages)
    batch = StaticBatch(
        iteration.decode_blocks, BLOCK_LENGTH, pool.total_pages, pool.scratch_page, pool.device
    )
    layout = batch.lay_out(layout_key(plan.passes))
    batch.send(layout)
    q, k, v = _random_rows(len(batch.fixed.write_slots), pool, config)
    runs, seconds = {}, {}
    for name in backend.fixed_kernels(batch.fixed):
        attention = backend.fixed(batch.fixed, name)
        if name.startswith("blocks"):
            attention.plan(layout)
            runs[name] = [
                partial(attention.run, q, k, v, layer) for layer in range(pool.num_layers)
            ]
            seconds[name] = cold_seconds(runs[name], pool.device, _CHOOSING_REPEATS)
    best = min(seconds, key=lambda each: seconds[each])
    return best, cold_seconds(runs[best], pool.device) / pool.num_layers


def _random_rows(num_rows: int, pool: KVPool, config: ModelConfig) -> tuple[Tensor, ...]:
    """Queries, keys and values."""
    return tuple(
        torch.randn(num_rows, heads, config.head_dim, device=pool.device).to(pool.dtype)
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    )


def _attention_seconds(
    backend: Attention, pool: KVPool, config: ModelConfig, iteration: Iteration
) -> float:
    """Of one layer."""
    plan = plan_of(iteration, config, pool.total_pages)
    layout = pack(plan.passes, config.family).layout
    backend.plan(layout)
    num_rows = iteration.prefill_tokens + BLOCK_LENGTH * iteration.decode_blocks
    q, k, v = _random_rows(num_rows, pool, config)
    runs = [partial(backend.run, q, k, v, layer) for layer in range(pool.num_layers)]
    return cold_seconds(runs, pool.device) / pool.num_layers
