"""Carries out a plan: one packed forward, one sampling step, one ``Outcome``.

Decides nothing about who runs (scheduler) and knows nothing of requests or time (loop). Called by
one thread; ``kv_pool`` may be read and written by transfers meanwhile, on pages that no plan
under way names. In float32 on a CPU the outcome of a pass is the same bit for bit whatever else
is in the plan (design section 3, *same bytes*).
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from sangam_worker.attention.layout import Int64s
from sangam_worker.attention.protocol import Attention
from sangam_worker.kv_pool import KVPool
from sangam_worker.launched import DeviceSpan, HostIteration, LaunchedIteration
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.linear import padded_rows
from sangam_worker.models.transformer import Transformer
from sangam_worker.packing import PackedBatch, pack
from sangam_worker.plan import Launched, Outcome, Plan
from sangam_worker.sampling.greedy import greedy_kernel
from sangam_worker.sampling.sampler import Sampler
from sangam_worker.uploads import sent_together


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
        """Hand an iteration to the device, without waiting for it.

        The one before must have come to its outcome: memory that iterations share is free then.
        """
        if self.kv_pool.device.type == "cpu":
            return HostIteration(partial(self._launch, plan))
        return self._launch(plan)

    @torch.inference_mode()
    def _launch(self, plan: Plan) -> Launched:
        self._claim_thread()
        batch = pack(plan.passes, self.model_config.family)
        span = DeviceSpan(self.kv_pool.device)
        proposals = self._sampler.launch(self._logits(batch), plan.passes)
        span.end()
        return LaunchedIteration(plan.iteration, proposals, span)

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Tensor:
        """Raw logits of the rows that predict each pass's committable positions, in order.

        Returns:
            ``[rows, vocab]``, padding rows at the end; ``[0, vocab]`` when nothing can commit.
        """
        self._claim_thread()
        return self._logits(pack(plan.passes, self.model_config.family))

    def _claim_thread(self) -> None:
        """Settings of the calling thread's own, whatever they were before."""
        device = self.kv_pool.device
        if device.type == "cpu":
            # Part of "same bytes": threads would split products differently from batch to batch.
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(device)

    def _logits(self, batch: PackedBatch) -> Tensor:
        self._attention.plan(batch.layout)
        num_head_rows = len(batch.head_rows)
        tokens, positions, head_rows = sent_together(
            [_padded(rows) for rows in (batch.tokens, batch.positions, batch.head_rows)],
            np.int64,
            self.kv_pool.device,
        )
        self._transformer.reserve(int(batch.positions.max()) + 1)
        return self._transformer.forward(
            tokens, positions, head_rows if num_head_rows else None, self._attention
        )


def _padded(rows: Int64s) -> Int64s:
    """Zeros behind the rows, up to the padded row count."""
    padded = np.zeros(padded_rows(len(rows)), dtype=np.int64)
    padded[: len(rows)] = rows
    return padded
