"""Carries out a plan: one packed forward, one sampling step, one ``Outcome``.

Decides nothing about who runs (scheduler) and knows nothing of requests or time (loop). Called by
one thread; ``kv_pool`` may be read and written by transfers meanwhile, on pages that no plan
under way names. In float32 on a CPU the outcome of a pass is the same bit for bit whatever else
is in the plan (design section 3, *same bytes*).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sangam_worker.attention.protocol import Attention
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.linear import padded_rows
from sangam_worker.models.transformer import Transformer
from sangam_worker.packing import pack
from sangam_worker.plan import Launched, Outcome, Plan
from sangam_worker.sampling.greedy import greedy_kernel
from sangam_worker.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True, eq=False)
class _LaunchedIteration:
    """Logits to be, and what is to be made of them."""

    plan: Plan
    logits: Tensor
    sampler: Sampler

    @property
    def device_seconds(self) -> float | None:
        """See ``Launched``."""
        return None

    @torch.inference_mode()
    def outcome(self) -> Outcome:
        """Sample, wait, apply the rules."""
        return Outcome(self.plan.iteration, self.sampler.sample(self.logits, self.plan.passes))


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

    def execute(self, plan: Plan) -> Outcome:
        """Run an iteration. K/V of the fed rows are on their pages when it returns."""
        return self.launch(plan).outcome()

    def launch(self, plan: Plan) -> Launched:
        """Hand an iteration to the device. The one before must have come to its outcome."""
        return _LaunchedIteration(plan, self.forward(plan), self._sampler)

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
