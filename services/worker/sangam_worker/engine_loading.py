"""Builds an engine from names: model, number format, device, attention backend, operators.

Decides what each name stands for and refuses what cannot be used, in one line that names it. How
many pages the pool gets is the caller's choice (``__main__`` for a worker, tests, benchmarks).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from sangam_core.errors import ConfigurationError
from sangam_worker.attention.flashinfer_backend import flashinfer_attention
from sangam_worker.attention.protocol import Attention
from sangam_worker.attention.torch_backend import TorchAttention
from sangam_worker.engine import Engine
from sangam_worker.graphs.buckets import BLOCK_TOKENS
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.config import ModelConfig, model_config, resolve_model
from sangam_worker.models.flashinfer_operators import flashinfer_operators
from sangam_worker.models.fp8_operators import fp8_kernels, with_fp8
from sangam_worker.models.operators import OperatorsFactory, TorchOperators
from sangam_worker.models.random_models import RANDOM_PREFIX
from sangam_worker.models.transformer import Transformer
from sangam_worker.progress import SILENT, Reports
from sangam_worker.weights import Weights, random_weights, read_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

AttentionFactory = Callable[[KVPool, int], Attention]
"""A backend over a pool, for a model with a number of query heads."""

ATTENTION_BACKENDS: Mapping[str, AttentionFactory] = {
    "torch": lambda pool, num_heads: TorchAttention(pool),
    "flashinfer": flashinfer_attention,
    "flashinfer-fa2": partial(flashinfer_attention, kernel="fa2"),
    "flashinfer-fa3": partial(flashinfer_attention, kernel="fa3"),
    "flashinfer-fa2-blocks": partial(flashinfer_attention, has_fa3=False),
}
OPERATORS: Mapping[str, OperatorsFactory] = {
    "torch": TorchOperators,
    "flashinfer": flashinfer_operators,
}

QUANTIZATIONS = {"none": False, "fp8": True}
"""Whether a layer's products are in FP8."""

T = TypeVar("T")


def load_engine(
    model: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    total_pages: int | Callable[[], int],
    attention: str | AttentionFactory = "torch",
    operators: str | OperatorsFactory = "torch",
    quantization: str = "none",
    seed: int = 0,
    max_sequence_tokens: int | None = None,
    reports: Reports = SILENT,
    graph_buckets: Sequence[int] = (),
    graph_block_tokens: int = BLOCK_TOKENS,
) -> Engine:
    """Build an engine.

    Args:
        model: a folder, a hub id, ``small`` (shipped) or ``random:<name>`` (benchmarks).
        dtype: ``float32`` or ``bfloat16``; a checkpoint stored in another one is cast.
        total_pages: pages of 16 tokens in the KV pool, or what says how many once the weights are
            on the device.
        attention: the backend by name, or what makes one over the pool (benchmarks).
        operators: what computes norms, gates and rotations, by name or as what makes them.
        quantization: ``none``, or ``fp8`` for the layers' products in e4m3.
        seed: of random weights.
        max_sequence_tokens: prompt and mask buffer at most; the model's own limit by default.
        reports: is told how far the weights are.
        graph_buckets, graph_block_tokens: what ``capture_graphs`` is to capture, see ``Engine``.

    Raises:
        ConfigurationError: one line that names what is unusable.
    """
    if isinstance(total_pages, int) and total_pages < 1:
        raise ConfigurationError(f"total_pages must be at least 1, not {total_pages}")
    torch_dtype = _choice(dtype, DTYPES, "dtype")
    if isinstance(attention, str):
        attention = _choice(attention, ATTENTION_BACKENDS, "attention")
    if isinstance(operators, str):
        operators = _choice(operators, OPERATORS, "operators")
    is_fp8 = _choice(quantization, QUANTIZATIONS, "quantization")
    torch_device = usable_device(device)
    config = model_config(model).shortened(max_sequence_tokens)
    if is_fp8:
        operators = with_fp8(operators, fp8_kernels(config, torch_dtype, torch_device))
    with torch.inference_mode():
        weigh = _weights_of(model, seed)
        weights = weigh(config, torch_dtype, torch_device, reports=reports, is_fp8=is_fp8)
        transformer = Transformer(config, weights, operators)
    num_pages = total_pages if isinstance(total_pages, int) else total_pages()
    pool = _pool(config, num_pages, torch_dtype, torch_device)
    return Engine(
        config,
        transformer,
        pool,
        attention(pool, config.num_heads),
        graph_buckets=graph_buckets,
        graph_block_tokens=graph_block_tokens,
    )


def _weights_of(model: str, seed: int) -> Callable[..., Weights]:
    """What makes a model's weights."""
    if model.startswith(RANDOM_PREFIX):
        return partial(random_weights, seed=seed)
    return partial(read_weights, resolve_model(model))


def _pool(
    config: ModelConfig, total_pages: int, dtype: torch.dtype, device: torch.device
) -> KVPool:
    return KVPool(
        num_layers=config.num_layers,
        total_pages=total_pages,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )


def _choice(name: str, choices: Mapping[str, T], setting: str) -> T:
    try:
        return choices[name]
    except KeyError:
        raise ConfigurationError(
            f"{setting} {name!r} is unknown; use one of {', '.join(choices)}"
        ) from None


def usable_device(name: str) -> torch.device:
    """A device by its name. ``ConfigurationError`` when nothing can be put there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"device {name!r} cannot be used: {reason}") from None
    return device
