"""The CPU gap of an iteration: how much of a worker's loop the device stands still.

Decides the load (blocks that decode together for as many passes as they have positions, on the real
loop, scheduler and engine) and the measure: 1 - device's time over the time from one iteration's
end to the next one's. The device's is the smaller of two: what its events say, which count it as
busy while a graph is handed over, and what the same pass takes when the host is out of its way.
Called by the parts.
"""

import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from statistics import median

from benchmarks.gpu.one_pass import plan_of, time_pass
from benchmarks.gpu.parts import Budget, Record, say
from benchmarks.iterations import BLOCK_LENGTH, Iteration
from sangam_core.decoding import Decoding, EosRule, Unmasking, UnmaskingRule
from sangam_core.errors import SangamError
from sangam_core.geometry import Geometry
from sangam_core.wire import BlockEvent, BlockKey, BlockStart, Completed, Lost, WireGeometry
from sangam_worker.block_state import BlockState, block_state_from
from sangam_worker.engine import Engine
from sangam_worker.interpreter import SWITCH_SECONDS
from sangam_worker.loop import EngineLoop
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.models.description import ModelConfig
from sangam_worker.plan import Launched, Outcome, Plan
from sangam_worker.scheduler import Scheduler

_NO_BUDGET_TOKENS = 2**40
_ONE_A_PASS = Decoding(
    unmasking=Unmasking(rule=UnmaskingRule.FIXED, steps=BLOCK_LENGTH), eos_rule=EosRule.IGNORE
)
_WARM_PASSES = 4
_NUM_ROUNDS = 3
_NUM_REPEATS = 9


class LoopFailed(SangamError):
    """Blocks were lost, or did not end in time."""


class TimedEngine:
    """An engine, and when iterations that decode all blocks ended, with the device's share of each.

    Attributes:
        rounds: of iterations that follow each other.
    """

    def __init__(self, engine: Engine, num_blocks: int) -> None:
        self._engine, self._num_blocks = engine, num_blocks
        self.rounds: list[list[tuple[float, float]]] = [[]]

    def launch(self, plan: Plan) -> Launched:
        """Launch it on the engine."""
        started = time.perf_counter()
        return _TimedLaunch(self, self._engine.launch(plan), plan, started)

    def ended(self, plan: Plan, launched: Launched, started: float) -> None:
        """Note an iteration whose outcome is there."""
        now = time.perf_counter()
        if plan.num_prefill_tokens or len(plan.passes) != self._num_blocks:
            self.rounds.append([])
            return
        # On a CPU, where the two are one, the whole of it is the device's.
        device = launched.device_seconds
        self.rounds[-1].append((now, now - started if device is None else device))


class _TimedLaunch:
    def __init__(self, timed: TimedEngine, launched: Launched, plan: Plan, started: float) -> None:
        self._timed, self._launched, self._plan, self._started = timed, launched, plan, started

    @property
    def device_seconds(self) -> float | None:
        return self._launched.device_seconds

    def outcome(self) -> Outcome:
        outcome = self._launched.outcome()
        self._timed.ended(self._plan, self._launched, self._started)
        return outcome


def measure_gap(
    record: Record, budget: Budget, engine: Engine, num_blocks: int, context_tokens: int
) -> None:
    """Let the blocks decode; fill in ``period_ms``, ``device_ms`` and ``gap_percent``.

    Raises:
        LoopFailed: a block was lost, or blocks never ran together.
    """
    timed = TimedEngine(engine, num_blocks)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)  # a worker's; freezing what is there would keep engines
    try:
        for _ in range(_NUM_ROUNDS):
            _decode(timed, engine, budget, num_blocks, context_tokens)
    finally:
        sys.setswitchinterval(interval)
    pairs = [
        (after[0] - before[0], after[1])
        for seen in timed.rounds
        for before, after in pairwise(seen[_WARM_PASSES:])
    ]
    if not pairs:
        raise LoopFailed(f"{num_blocks} blocks never decoded together")
    period, by_events = (1000 * median(values) for values in zip(*pairs, strict=True))
    iteration = Iteration(0, num_blocks, context_tokens, BLOCK_LENGTH)
    plan = plan_of(iteration, engine.model_config, engine.kv_pool.total_pages)
    alone = time_pass(engine, plan, _NUM_REPEATS).device
    record |= {
        "num_blocks": num_blocks,
        "num_iterations": len(pairs),
        "period_ms": period,
        "device_ms": min(by_events, alone),
        "device_by_events_ms": by_events,
        "device_alone_ms": alone,
        "gap_percent": 100 * (1 - min(by_events, alone) / period),
    }
    say(f"         {record}")


def _decode(
    timed: TimedEngine, engine: Engine, budget: Budget, num_blocks: int, context_tokens: int
) -> None:
    config = engine.model_config
    scheduler = Scheduler(
        mask_id=config.mask_id,
        total_pages=engine.kv_pool.total_pages,
        tau_tokens=_NO_BUDGET_TOKENS,
    )
    watch = _Watch(num_blocks)
    loop = EngineLoop(timed, scheduler, watch.publish, WorkerMetrics())
    loop.start()
    try:
        for index in range(num_blocks):
            loop.submit(_block(index, context_tokens, config), budget.left_seconds)
        watch.wait(budget.left_seconds)
    finally:
        loop.stop(timeout_seconds=30)


class _Watch:
    """Waits for every block's last event."""

    def __init__(self, num_blocks: int) -> None:
        self._left = num_blocks
        self._lost = ""
        self._done = threading.Event()

    def publish(self, batch: Sequence[tuple[BlockKey, BlockEvent]]) -> None:
        for _, event in batch:
            if isinstance(event, Lost):
                self._lost = event.reason.message
            self._left -= isinstance(event, Completed | Lost)
        if self._left <= 0:
            self._done.set()

    def wait(self, seconds: float) -> None:
        if not self._done.wait(max(0.0, seconds)):
            raise LoopFailed("the blocks did not end in time")
        if self._lost:
            raise LoopFailed(self._lost)


def _block(index: int, context_tokens: int, config: ModelConfig) -> BlockState:
    """The last block of a sequence as long as the context."""
    random = Random(index)
    prompt = context_tokens - BLOCK_LENGTH
    ids = [random.randrange(min(1000, config.mask_id)) for _ in range(prompt)]
    start = BlockStart(
        key=BlockKey(request_id=f"block-{index}", block=0),
        worker_epoch="in-process",
        arrival_seconds=float(index),
        ids=(*ids, *[config.mask_id] * BLOCK_LENGTH),
        geometry=WireGeometry.of(Geometry(prompt, 1, BLOCK_LENGTH)),
        decoding=_ONE_A_PASS,
    )
    return block_state_from(start, config.mask_id, config.vocab_size)
