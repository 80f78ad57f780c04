"""Carries out a plan: one packed forward, one sampling step, one ``Outcome``.

Decides nothing about who runs (scheduler) and knows nothing of requests or time (loop). Called by
one thread; ``kv_pool`` may be read and written by transfers meanwhile, on pages that no plan
under way names. In float32 on a CPU the outcome of a pass is the same bit for bit whatever else
is in the plan (design section 3, *same bytes*).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from sangam_core.errors import ConfigurationError
from sangam_worker.attention.flashinfer_backend import flashinfer_attention
from sangam_worker.attention.protocol import Attention
from sangam_worker.attention.torch_backend import TorchAttention
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.config import read_model_config, resolve_model
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.flashinfer_operators import flashinfer_operators
from sangam_worker.models.linear import padded_rows
from sangam_worker.models.operators import OperatorsFactory, TorchOperators
from sangam_worker.models.random_models import RANDOM_PREFIX, random_config
from sangam_worker.models.transformer import Transformer
from sangam_worker.packing import pack
from sangam_worker.plan import Outcome, Plan
from sangam_worker.sampling.greedy import greedy_kernel
from sangam_worker.sampling.sampler import Sampler
from sangam_worker.weights import random_weights, read_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

AttentionFactory = Callable[[KVPool, int], Attention]
"""A backend over a pool, for a model with a number of query heads."""

ATTENTION_BACKENDS: Mapping[str, AttentionFactory] = {
    "torch": lambda pool, num_heads: TorchAttention(pool),
    "flashinfer": flashinfer_attention,
    "flashinfer-fa2": partial(flashinfer_attention, kernel="fa2"),
    "flashinfer-fa3": partial(flashinfer_attention, kernel="fa3"),
}
OPERATORS: Mapping[str, OperatorsFactory] = {
    "torch": TorchOperators,
    "flashinfer": flashinfer_operators,
}

T = TypeVar("T")


class Engine:
    """One model on one device.

    Attributes:
        model_config: the model in the engine's terms. kv_pool: its paged KV.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        transformer: Transformer,
        kv_pool: KVPool,
        attention: Attention,
    ) -> None:
        self.model_config = model_config
        self.kv_pool = kv_pool
        self._transformer = transformer
        self._attention = attention
        kernel = greedy_kernel(model_config, kv_pool.dtype, kv_pool.device)
        self._sampler = Sampler(model_config, kv_pool.dtype, kernel)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> Outcome:
        """Run an iteration. K/V of the fed rows are on their pages when it returns."""
        logits = self.forward(plan)
        return Outcome(plan.iteration, self._sampler.sample(logits, plan.passes))

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Tensor:
        """Raw logits of the rows that predict each pass's committable positions, in order.

        Returns:
            ``[rows, vocab]``, padding rows at the end; ``[0, vocab]`` when nothing can commit.
        """
        if self.kv_pool.device.type == "cpu":
            # Part of "same bytes": threads would split products differently from batch to batch.
            # The setting is the calling thread's own, whatever it was before.
            torch.set_num_threads(1)
        batch = pack(plan.passes, self.model_config.family)
        self._attention.plan(batch.layout)
        tokens, positions = self._on_device(batch.tokens, batch.positions)
        head_rows = None
        if len(batch.head_rows):
            (head_rows,) = self._on_device(batch.head_rows)
        self._transformer.reserve(int(batch.positions.max()) + 1)
        return self._transformer.forward(tokens, positions, head_rows, self._attention)

    def _on_device(self, *arrays: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        """Stack arrays of one length, zeros behind them up to the padded row count."""
        num_rows = len(arrays[0])
        stacked = np.zeros((len(arrays), padded_rows(num_rows)), dtype=np.int64)
        stacked[:, :num_rows] = arrays
        return torch.from_numpy(stacked).to(self.kv_pool.device)


def load_engine(
    model: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    total_pages: int,
    attention: str | AttentionFactory = "torch",
    operators: str | OperatorsFactory = "torch",
    seed: int = 0,
) -> Engine:
    """Build an engine.

    Args:
        model: a folder, a hub id, ``small`` (shipped) or ``random:<name>`` (benchmarks).
        dtype: ``float32`` or ``bfloat16``; a checkpoint stored in another one is cast.
        total_pages: pages of 16 tokens in the KV pool.
        attention: the backend by name, or what makes one over the pool (benchmarks).
        operators: what computes norms, gates and rotations, by name or as what makes them.
        seed: of random weights.

    Raises:
        ConfigurationError: one line that names what is unusable.
    """
    if total_pages < 1:
        raise ConfigurationError(f"total_pages must be at least 1, not {total_pages}")
    torch_dtype = _choice(dtype, DTYPES, "dtype")
    if isinstance(attention, str):
        attention = _choice(attention, ATTENTION_BACKENDS, "attention")
    if isinstance(operators, str):
        operators = _choice(operators, OPERATORS, "operators")
    torch_device = _device(device)
    with torch.inference_mode():
        if model.startswith(RANDOM_PREFIX):
            config = random_config(model)
            weights = random_weights(config, torch_dtype, torch_device, seed)
        else:
            folder = resolve_model(model)
            config = read_model_config(folder, name=model)
            weights = read_weights(folder, config, torch_dtype, torch_device)
        transformer = Transformer(config, weights, operators)
    pool = KVPool(
        num_layers=config.num_layers,
        total_pages=total_pages,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch_dtype,
        device=torch_device,
    )
    return Engine(config, transformer, pool, attention(pool, config.num_heads))


def _choice(name: str, choices: Mapping[str, T], setting: str) -> T:
    try:
        return choices[name]
    except KeyError:
        raise ConfigurationError(
            f"{setting} {name!r} is unknown; use one of {', '.join(choices)}"
        ) from None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"device {name!r} cannot be used: {reason}") from None
    return device
