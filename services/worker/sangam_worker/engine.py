"""Carries out a plan: one packed forward, one sampling step, one ``Outcome``.

Decides nothing about who runs (scheduler) and knows nothing of requests or time (loop). Called by
one thread; ``kv_pool`` may be read and written by transfers meanwhile, on pages that no plan
under way names. In float32 on a CPU the outcome of a pass is the same bit for bit whatever else
is in the plan (design section 3, *same bytes*).
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sangam_core.errors import ConfigurationError
from sangam_worker.attention.protocol import Attention, AttentionBackend
from sangam_worker.graphs.buckets import BLOCK_TOKENS
from sangam_worker.graphs.capture import Capture, CudaCapture
from sangam_worker.graphs.runner import GraphRunner, Progress
from sangam_worker.kv_pool import KVPool
from sangam_worker.launched import DeviceSpan, HostIteration, LaunchedIteration
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.transformer import Transformer
from sangam_worker.packing import pack, padded, rows_that_predict
from sangam_worker.plan import Launched, Outcome, Plan
from sangam_worker.sampling.greedy import greedy_kernel
from sangam_worker.sampling.sampler import Proposals, Sampler
from sangam_worker.uploads import sent_together


class Engine:
    """One model on one device.

    Args:
        graph_buckets: numbers of blocks for which iterations of decodes alone are to be captured
            (``capture_graphs``), see ``graphs.buckets``. graph_block_tokens: of what length.

    Attributes:
        model_config: the model in the engine's terms. kv_pool: its paged KV.

    Raises:
        ConfigurationError: graphs are wanted of a backend that has none.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        transformer: Transformer,
        kv_pool: KVPool,
        attention: Attention,
        *,
        graph_buckets: Sequence[int] = (),
        graph_block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.model_config = model_config
        self.kv_pool = kv_pool
        self._transformer = transformer
        self._attention = attention
        kernel = greedy_kernel(model_config, kv_pool.dtype, kv_pool.device)
        self._sampler = Sampler(model_config, kv_pool.dtype, kernel)
        self._reserve_positions()
        self._graphs: GraphRunner | None = None
        if graph_buckets:
            if not isinstance(attention, AttentionBackend):
                raise ConfigurationError(f"{type(attention).__name__} cannot be captured in graphs")
            self._graphs = GraphRunner(
                model_config, transformer, kv_pool, attention, graph_buckets, graph_block_tokens
            )

    @torch.inference_mode()
    def _reserve_positions(self) -> None:
        """Up to the longest sequence, so that no request waits for a table to grow."""
        self._claim_thread()
        self._transformer.reserve(self.model_config.max_sequence_tokens)

    def capture_graphs(
        self,
        progress: Progress = lambda done, total: None,
        capture: Capture | None = None,
        *,
        is_measured: bool = True,
    ) -> int:
        """Capture the graphs, if any are wanted: seconds, or minutes where kernels are compiled.

        Until then, and for iterations that are not a graph's, passes are issued one by one.

        Args:
            progress: told how many of how many are captured.
            capture: what captures; by default CUDA graphs.
            is_measured: each gets the kernels that are found to be the fastest for its size.

        Returns:
            Bytes of the device that are gone for it.

        Raises:
            ConfigurationError: the device or the attention backend has no graphs.
        """
        if self._graphs is None:
            return 0
        if capture is None:
            if self.kv_pool.device.type != "cuda":
                raise ConfigurationError(
                    "CUDA graphs need a CUDA device; leave graph_buckets empty"
                )
            self._claim_thread()
            capture = CudaCapture(self.kv_pool.device)
        self._graphs.capture(capture, progress, is_measured=is_measured)
        return capture.taken_bytes

    @property
    def graph_choices(self) -> dict[int, dict[str, str]]:
        """What was fastest in the captured graphs, by their numbers of blocks."""
        return {} if self._graphs is None else self._graphs.chosen

    def execute(self, plan: Plan) -> Outcome:
        """Run an iteration. K/V of the fed rows are on their pages when it returns."""
        return self.launch(plan).outcome()

    def launch(self, plan: Plan) -> Launched:
        """Hand an iteration to the device, without waiting for it.

        The one before must have come to its outcome: memory that iterations share is free then.
        When this raises, the device does nothing of it any more.
        """
        if self.kv_pool.device.type == "cpu":
            return HostIteration(partial(self._launch, plan))
        return self._launch(plan)

    @torch.inference_mode()
    def _launch(self, plan: Plan) -> Launched:
        self._claim_thread()
        span = DeviceSpan(self.kv_pool.device)
        try:
            proposals = self._propose(plan, span)
        except Exception:
            # What was handed over still runs, on pages that are others' once this is known.
            span.settle()
            raise
        span.end()
        return LaunchedIteration(plan.iteration, proposals, span)

    def _propose(self, plan: Plan, span: DeviceSpan) -> Proposals:
        """The pass, from its graph if it has one, and the sampling behind it."""
        prepared = None if self._graphs is None else self._graphs.prepare(plan.passes)
        if prepared is not None:
            span.begin()
            return self._sampler.launch(prepared.replay(), plan.passes)
        run = self._prepare(plan)
        span.begin()
        return self._sampler.launch(run(), plan.passes)

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Tensor:
        """Raw logits of the rows that predict each pass's committable positions, in order.

        Returns:
            ``[rows, vocab]``, padding rows at the end; ``[0, vocab]`` when nothing can commit.
        """
        self._claim_thread()
        return self._prepare(plan)()

    @torch.inference_mode()
    def replay(self, plan: Plan) -> Tensor | None:
        """The same logits, without padding rows, from the plan's graph; ``None`` if it has none."""
        self._claim_thread()
        prepared = None if self._graphs is None else self._graphs.prepare(plan.passes)
        if prepared is None:
            return None
        return prepared.replay()[: len(rows_that_predict(plan.passes, self.model_config.family))]

    def _claim_thread(self) -> None:
        """Settings of the calling thread's own, whatever they were before."""
        device = self.kv_pool.device
        if device.type == "cpu":
            # Part of "same bytes": threads would split products differently from batch to batch.
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(device)

    def _prepare(self, plan: Plan) -> Callable[[], Tensor]:
        """Send an iteration's arrays; what issues its operations and gives its logits."""
        batch = pack(plan.passes, self.model_config.family)
        self._attention.plan(batch.layout)
        num_head_rows = len(batch.head_rows)
        tokens, positions, head_rows = sent_together(
            [padded(rows) for rows in (batch.tokens, batch.positions, batch.head_rows)],
            np.int64,
            self.kv_pool.device,
        )
        self._transformer.reserve(int(batch.positions.max()) + 1)
        return partial(
            self._transformer.forward,
            tokens,
            positions,
            head_rows if num_head_rows else None,
            self._attention,
        )
