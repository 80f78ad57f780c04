"""The floor of a pass: the sum over its operators of the larger of bytes and FLOPs.

Decides what each operator must at least move and compute, one by one: a sum over the whole pass
would let the products' arithmetic hide what attention reads. Sizes come from the cost model's
shapes, ceilings from ``ceilings``. Pure.
"""

from dataclasses import dataclass

from benchmarks.iterations import BLOCK_LENGTH, Iteration
from sangam_loadtest.costs.gpus import Gpu
from sangam_loadtest.costs.shapes import ModelShape

_FP8_BYTES = 1


@dataclass(frozen=True, slots=True)
class Operator:
    """What one operator moves and computes, over all layers that have it."""

    name: str
    num_bytes: float
    flops: float
    is_fp8: bool = False

    def seconds(self, gpu: Gpu) -> float:
        """Its floor."""
        peak = gpu.fp8_flops if self.is_fp8 else gpu.bf16_flops
        return max(self.num_bytes / gpu.bytes_per_second, self.flops / peak)


def operators_of(shape: ModelShape, iteration: Iteration, is_fp8: bool = False) -> list[Operator]:
    """The operators of a pass whose masked rows want logits, the last layer's others left out."""
    rows = iteration.prefill_tokens + BLOCK_LENGTH * iteration.decode_blocks
    head = iteration.masks * iteration.decode_blocks
    head += BLOCK_LENGTH if iteration.prefill_tokens else 0
    return [
        *_products(shape, rows, head, is_fp8),
        _attention(shape, iteration, head),
        _small_kernels(shape, rows, head),
        _product("head", shape.hidden_size, shape.vocab_size, head, 1, shape.number_bytes, False),
        Operator("sampler", head * shape.vocab_size * shape.number_bytes, 0.0),
    ]


def floor_seconds(shape: ModelShape, iteration: Iteration, gpu: Gpu, is_fp8: bool = False) -> float:
    """The sum over the operators."""
    return sum(item.seconds(gpu) for item in operators_of(shape, iteration, is_fp8))


def _products(shape: ModelShape, rows: int, head: int, is_fp8: bool) -> list[Operator]:
    """Every layer's four products; the last layer's on the head rows only, but for K and V."""
    query, both, hidden = shape.query_size, shape.key_value_size, shape.hidden_size
    mlp, layers = shape.intermediate_size, shape.num_layers
    sizes = {
        "qkv": (hidden, query + both),
        "attention out": (query, hidden),
        "gate and up": (hidden, 2 * mlp),
        "down": (mlp, hidden),
    }
    number = _FP8_BYTES if is_fp8 else shape.number_bytes
    found = []
    for name, (inputs, outputs) in sizes.items():
        early = _product(name, inputs, outputs, rows, layers - 1, number, is_fp8)
        last = _product(name, inputs, outputs, head, 1, number, is_fp8)
        if name == "qkv":
            keys = _product(name, hidden, both, rows, 1, number, is_fp8)
            last = _product(name, hidden, query, head, 1, number, is_fp8)
            last = Operator(name, keys.num_bytes + last.num_bytes, keys.flops + last.flops)
        total_bytes, flops = early.num_bytes + last.num_bytes, early.flops + last.flops
        found.append(Operator(name, total_bytes, flops, is_fp8))
    return found


def _product(
    name: str, inputs: int, outputs: int, rows: int, num_layers: int, number: int, is_fp8: bool
) -> Operator:
    """``rows`` rows times a weight. Of no rows nothing is read either."""
    if not rows:
        return Operator(name, 0.0, 0.0, is_fp8)
    weights = inputs * outputs
    num_bytes = weights * number + rows * (inputs * number + outputs * 2)
    return Operator(name, num_layers * num_bytes, num_layers * 2.0 * weights * rows, is_fp8)


def _attention(shape: ModelShape, iteration: Iteration, head: int) -> Operator:
    """K and V of every sequence once, queries and answers; two products of queries and keys.

    In the last layer only the head rows ask, but all keys are read.
    """
    blocks, tokens = iteration.decode_blocks, iteration.prefill_tokens
    keys = blocks * iteration.context_tokens + tokens
    pairs = BLOCK_LENGTH * blocks * iteration.context_tokens + tokens**2
    head_pairs = iteration.masks * blocks * iteration.context_tokens
    head_pairs += BLOCK_LENGTH * tokens
    rows = (shape.num_layers - 1) * (BLOCK_LENGTH * blocks + tokens) + head
    num_bytes = shape.kv_bytes_per_token * keys + 2 * rows * shape.query_size * shape.number_bytes
    all_pairs = (shape.num_layers - 1) * pairs + head_pairs
    return Operator("attention", num_bytes, 4.0 * shape.query_size * all_pairs)


def _small_kernels(shape: ModelShape, rows: int, head: int) -> Operator:
    """Norms, RoPE, SiLU-mul, page writes."""
    layers = (shape.num_layers - 1) * rows + head
    return Operator("small kernels", layers * shape.small_kernel_bytes_per_row, 0.0)
