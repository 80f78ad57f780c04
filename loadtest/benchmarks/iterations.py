"""One iteration of a worker's loop, made to measure: so many prefill rows and decode blocks.

Decides how such an iteration comes about and what is timed: ``next_plan``, ``execute`` and
``apply``, as a worker's thread runs them, on the real scheduler and engine. Which iterations are
measured, and how often, ``pass_costs`` decides.
"""

import time
from dataclasses import dataclass

from torch import Tensor

from sangam_core.decoding import Decoding, EosRule, Resume, Unmasking, UnmaskingRule
from sangam_core.errors import SangamError
from sangam_core.geometry import DEFAULT_BLOCK_LENGTH, PAGE_TOKENS, Geometry
from sangam_core.wire import BlockKey, BlockStart, KVSource, WireGeometry
from sangam_worker.attention.layout import AttentionLayout
from sangam_worker.attention.protocol import Attention, KeepsRows, Places
from sangam_worker.block_state import BlockState, block_state_from
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import ATTENTION_BACKENDS, load_engine
from sangam_worker.kv_pool import KVPool
from sangam_worker.plan import Plan
from sangam_worker.sampling.rules import committable
from sangam_worker.scheduler import Scheduler

BLOCK_LENGTH = DEFAULT_BLOCK_LENGTH
_ONE_A_PASS = Decoding(
    unmasking=Unmasking(rule=UnmaskingRule.FIXED, steps=BLOCK_LENGTH), eos_rule=EosRule.IGNORE
)
"""One commit a pass: a block keeps its masks for as long as it is measured."""
_NO_BUDGET_TOKENS = 2**40
_ELSEWHERE = KVSource(worker_id="elsewhere", epoch="none", url="http://elsewhere")


class NotMeasured(SangamError):
    """An iteration did not do what it was made to do."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """What runs together.

    Attributes:
        prefill_tokens: rows of one whole prefill; 0: none.
        decode_blocks: blocks of 32 rows that decode.
        context_tokens: keys that each of them sees; without any, those of the prefill.
        masks: masked positions that each decode block has left.
    """

    prefill_tokens: int
    decode_blocks: int
    context_tokens: int
    masks: int

    @property
    def num_pages(self) -> int:
        """KV pages that it needs."""
        decodes = self.decode_blocks * -(-self.context_tokens // PAGE_TOKENS)
        return decodes + -(-self.prefill_tokens // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one iteration took.

    Attributes:
        total_seconds: scheduler and engine, until the commits are applied.
        scheduler_seconds: the scheduler's part of it.
        cpu_seconds: CPU time of the thread meanwhile: other processes disturb it less.
        issue_seconds: until ``forward`` has issued the same pass, on a device that works beside
            the host; ``None`` on a CPU, which computes meanwhile.
        rows_masked: rows that went through the LM head.
    """

    total_seconds: float
    scheduler_seconds: float
    cpu_seconds: float
    issue_seconds: float | None
    rows_masked: int


class SkippableAttention:
    """A backend whose attention can be left out, to see what it costs. K/V are kept all the same.

    Attributes:
        is_left_out: give zeros instead of attending.
    """

    def __init__(self, backend: Attention) -> None:
        self._backend = backend
        self.is_left_out = False

    def plan(self, layout: AttentionLayout) -> None:
        """Take the index arrays of the next iteration."""
        self._backend.plan(layout)

    def write(self, k_new: Tensor, v_new: Tensor, layer: int) -> None:
        """Keep the K/V of the rows that the layout says."""
        self._backend.write(k_new, v_new, layer)

    def run(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, layer: int, *, head_rows_only: bool = False
    ) -> Tensor:
        """Keep the new K/V, then attend or not."""
        if not self.is_left_out:
            return self._backend.run(q, k_new, v_new, layer, head_rows_only=head_rows_only)
        self._backend.write(k_new, v_new, layer)
        return q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])

    def places(self) -> Places | None:
        """Of a backend that has such."""
        return self._backend.places() if isinstance(self._backend, KeepsRows) else None

    def attend(self, q: Tensor, layer: int) -> Tensor:
        """Attend or not, where K/V have been kept."""
        assert isinstance(self._backend, KeepsRows)
        if self.is_left_out:
            return q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        return self._backend.attend(q, layer)


class IterationBench:
    """A worker's scheduler and engine, for iterations of any make.

    Args:
        model, dtype, device, attention: as the engine's loader takes them.
        total_pages: KV pool; ``Iteration.num_pages`` of the largest.

    Raises:
        ConfigurationError: from the loader, with one line that names what is unusable.
    """

    def __init__(
        self, model: str, *, dtype: str, device: str, attention: str, total_pages: int
    ) -> None:
        self._attention: SkippableAttention | None = None

        def skippable(pool: KVPool, num_heads: int) -> Attention:
            self._attention = SkippableAttention(ATTENTION_BACKENDS[attention](pool, num_heads))
            return self._attention

        self.engine: Engine = load_engine(
            model,
            dtype=dtype,
            device=device,
            attention=skippable if attention in ATTENTION_BACKENDS else attention,
            total_pages=total_pages,
        )

    def measure(self, iteration: Iteration, *, is_attention_left_out: bool = False) -> Timing:
        """Run an iteration once. Its decodes have run once before, as most have in a worker.

        Raises:
            NotMeasured: a pass gave no usable logits, or not everything ran together.
        """
        assert self._attention is not None
        self._attention.is_left_out = is_attention_left_out
        config = self.engine.model_config
        scheduler = Scheduler(
            mask_id=config.mask_id,
            total_pages=self.engine.kv_pool.total_pages,
            tau_tokens=_NO_BUDGET_TOKENS,
        )
        for index in range(iteration.decode_blocks):
            state = self._decode(index, iteration)
            if not scheduler.reserve(state):
                raise NotMeasured(f"{iteration} needs more pages than the pool has")
            scheduler.arrived(state.key)
        if iteration.decode_blocks:
            self._timed(scheduler, iteration.decode_blocks)
        if iteration.prefill_tokens:
            scheduler.submit(self._prefill(iteration))
        return self._timed(scheduler, iteration.decode_blocks + bool(iteration.prefill_tokens))

    def _timed(self, scheduler: Scheduler, num_passes: int) -> Timing:
        cpu, started = time.thread_time(), time.perf_counter()
        plan = scheduler.next_plan()
        if plan is None or len(plan.passes) != num_passes:
            raise NotMeasured(f"{num_passes} passes should run together, not {plan}")
        planned = time.perf_counter()
        outcome = self.engine.execute(plan)
        executed = time.perf_counter()
        progress = scheduler.apply(outcome)
        applied, cpu = time.perf_counter(), time.thread_time() - cpu
        if len(progress) != num_passes:
            errors = [item.error for item in outcome.passes if item.error is not None]
            raise NotMeasured("; ".join(errors))
        family = self.engine.model_config.family
        return Timing(
            total_seconds=applied - started,
            scheduler_seconds=applied - started - (executed - planned),
            cpu_seconds=cpu,
            issue_seconds=self._issue_seconds(plan),
            rows_masked=sum(len(committable(item, family)) for item in plan.passes),
        )

    def _issue_seconds(self, plan: Plan) -> float | None:
        """Issue the same pass again; it writes the same K/V to the same pages."""
        if self.engine.kv_pool.device.type == "cpu":
            return None
        started = time.perf_counter()
        logits = self.engine.forward(plan)
        issued = time.perf_counter() - started
        logits.cpu()  # waits, so that the next measurement finds an idle device
        return issued

    def _prefill(self, iteration: Iteration) -> BlockState:
        """A request's first block, all masks."""
        return self._state("prefill", iteration.prefill_tokens, BLOCK_LENGTH, None)

    def _decode(self, index: int, iteration: Iteration) -> BlockState:
        """A block whose prefill ran elsewhere, with one mask more than is to be measured."""
        resume = Resume(step=1, initial_masks=BLOCK_LENGTH)
        masks = iteration.masks + 1
        return self._state(f"decode-{index:04}", iteration.context_tokens, masks, resume)

    def _state(
        self, name: str, total_tokens: int, num_masks: int, resume: Resume | None
    ) -> BlockState:
        config = self.engine.model_config
        filler = 1 if config.mask_id == 0 else 0
        ids = [filler] * (total_tokens - num_masks) + [config.mask_id] * num_masks
        geometry = Geometry(total_tokens - BLOCK_LENGTH, 1, BLOCK_LENGTH)
        start = BlockStart(
            key=BlockKey(request_id=name, block=0),
            worker_epoch="in-process",
            arrival_seconds=0.0,
            ids=tuple(ids),
            geometry=WireGeometry.of(geometry),
            decoding=_ONE_A_PASS,
            source=None if resume is None else _ELSEWHERE,
            resume=resume,
        )
        return block_state_from(start, config.mask_id, config.vocab_size)
