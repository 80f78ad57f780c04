"""The GPU thread: owns scheduler and engine, runs iteration after iteration.

Everything else asks through thread-safe methods that return at once. They are carried out between
two iterations; only what transfers need, of blocks that no plan names, beside a running one (or
each would wait for a pass of both workers). What happened to blocks goes out as wire events, one
batch an iteration. Decides deadlines and what an engine failure costs; who may run is the
scheduler's decision, who may come in the service's. The thread never awaits, the event loop never
touches tensors.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

import structlog

from sangam_core.answer import Completion
from sangam_core.wire import (
    BlockEvent,
    BlockKey,
    Completed,
    HeldBlock,
    KVArrived,
    KVSent,
    LossReason,
    Lost,
    PassRan,
    Prefilled,
)
from sangam_worker.block_state import BlockState, Stage
from sangam_worker.inbox import Inbox
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.plan import Outcome, PassOutcome, Plan
from sangam_worker.scheduler import Progress, Scheduler
from sangam_worker.tracking import Expiries, LoopStatus, Moved, TrackedBlock

Notice = tuple[BlockKey, BlockEvent]
"""One event of one block."""

Publish = Callable[[Sequence[Notice]], None]
"""Called on the GPU thread with everything that an iteration brought, in order."""

_ResultT = TypeVar("_ResultT")

log = structlog.get_logger(__name__)


class Executes(Protocol):
    """The engine, as far as the loop knows it."""

    def execute(self, plan: Plan) -> Outcome:
        """Run one iteration; blocks until its commits are on the host."""
        ...


class EngineLoop:
    """The thread that computes.

    Args:
        publish: takes each batch of events (called on the thread).
        clock: monotonic seconds.
        max_engine_failures: failed iterations in a row that make the loop unhealthy.
        stall_seconds: an iteration longer than this makes the loop unhealthy.
    """

    def __init__(
        self,
        engine: Executes,
        scheduler: Scheduler,
        publish: Publish,
        metrics: WorkerMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_engine_failures: int = 3,
        stall_seconds: float = 300.0,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._publish = publish
        self._metrics = metrics
        self._clock = clock
        self._max_engine_failures = max_engine_failures
        self._stall_seconds = stall_seconds
        self._inbox = Inbox()
        self._outbox: list[Notice] = []
        self._tracked: dict[BlockKey, TrackedBlock] = {}
        self._expiries = Expiries()
        self._num_failures = 0
        self._last_failure = ""
        self._busy_since: float | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="gpu", daemon=True)
        self._status = LoopStatus(free_pages=scheduler.pages.num_free)
        metrics.pool_is(scheduler.pages.total_pages, scheduler.tau_tokens)
        self._note_status()

    # -- from any thread ------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """End the thread after the running iteration; False when that takes too long."""
        self._inbox.put(self._stop_now)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def status(self) -> LoopStatus:
        """As of the last iteration."""
        return self._status

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def ailment(self) -> str | None:
        """What is wrong with the thread or its device; ``None`` when nothing is."""
        if not self._thread.is_alive():
            return "the GPU thread does not run"
        if self._num_failures >= self._max_engine_failures:
            return f"the engine failed {self._num_failures} times in a row: {self._last_failure}"
        if (since := self._busy_since) is not None and self._clock() - since > self._stall_seconds:
            return f"an iteration has been running for more than {self._stall_seconds:g} s"
        return None

    def submit(self, state: BlockState, deadline_seconds: float) -> None:
        """Queue a block's prefill. Its key must not be here."""
        now = self._clock()
        tracked = TrackedBlock(state, now, now + deadline_seconds, is_transferred=False)
        self._inbox.put(lambda: self._submit_now(tracked))

    def reserve(
        self, state: BlockState, deadline_seconds: float
    ) -> "Future[tuple[int, ...] | None]":
        """Reserve a block's pages for KV that will arrive: the pages, ``None`` without room.

        The block is pinned until ``transfer_ended``.
        """
        now = self._clock()
        tracked = TrackedBlock(state, now, now + deadline_seconds, is_transferred=True)
        return self._ask_beside(lambda: self._reserve_now(tracked))

    def pin(self, key: BlockKey) -> "Future[tuple[int, ...] | None]":
        """Pin a held block's pages for sending until ``transfer_ended``.

        ``None`` when the block is not held here, or is being sent already.
        """
        return self._ask_beside(lambda: self._pin_now(key))

    def unpin(self, key: BlockKey) -> None:
        """Take a pin back: the transfer was not begun, the block waits on."""
        self._ask_beside(lambda: self._unpin_now(key))

    def transfer_ended(self, key: BlockKey, result: Moved | LossReason) -> None:
        """Unpin a block. No thread reads or writes its pages any more."""
        self._inbox.put(partial(self._transfer_ended_now, key, result, self._clock()))

    def remove(self, key: BlockKey, reason: LossReason) -> None:
        """Drop a block, at once or when its transfer has ended. Unknown keys change nothing."""
        self._inbox.put(lambda: self._lose(key, reason))

    def hand_back_waiting(self, reason: LossReason) -> None:
        """Drop every block that waits for its first pass."""
        self._inbox.put(lambda: self._hand_back_now(reason))

    def drop_all(self, reason: LossReason) -> None:
        """Drop every block; pinned ones when their transfers have ended."""
        self._inbox.put(lambda: self._drop_all_now(reason))

    def set_tau(self, tau_tokens: int) -> None:
        """Change the token budget of an iteration; what was carried is forgotten."""
        self._inbox.put(lambda: self._set_tau_now(tau_tokens))

    def held(self) -> "Future[tuple[HeldBlock, ...]]":
        """Every block here."""
        return self._inbox.ask(self._held_now)

    # -- on the thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                with self._inbox.books:
                    plan = self._scheduler.next_plan()
                if plan is not None:
                    self._iterate(plan)
                self._flush()
                self._take_commands(is_idle=plan is None)
                with self._inbox.books:
                    self._expire()
            self._flush()
        except Exception:
            log.exception("the GPU thread has ended by a bug")
            reason = LossReason(code="engine_error", message="the worker's GPU thread has ended")
            keys = tuple(self._tracked)  # another thread may be reserving
            self._publish((*self._outbox, *((key, Lost(reason=reason)) for key in keys)))

    def _iterate(self, plan: Plan) -> None:
        started = self._clock()
        self._busy_since = started
        try:
            outcome = self._engine.execute(plan)
        except Exception as error:  # noqa: BLE001 - whatever a device throws
            with self._inbox.books:
                self._engine_failed(plan, error)
            return
        finally:
            self._busy_since = None
        ended = self._clock()
        self._num_failures = 0
        with self._inbox.books:
            committed_tokens = self._take_in(outcome, started, ended)
        self._metrics.iteration_ran(plan, ended - started, committed_tokens)

    def _take_in(self, outcome: Outcome, started: float, ended: float) -> int:
        """Report what an iteration did; the tokens that it committed."""
        committed_tokens = 0
        for progress in self._scheduler.apply(outcome):
            committed_tokens += len(progress.commits)
            self._report(progress, started, ended)
        for item in outcome.passes:
            if item.error is not None:
                self._lost_in_engine(item.key, item.error)
        return committed_tokens

    def _engine_failed(self, plan: Plan, error: Exception) -> None:
        """Lose the blocks of a failed iteration; nothing else knows what the engine left."""
        self._last_failure = f"{type(error).__name__}: {error}"
        self._num_failures += 1
        self._metrics.iteration_failed()
        log.error("iteration failed", iteration=plan.iteration, exc_info=error)
        failed = (PassOutcome(item.key, (), error=self._last_failure) for item in plan.passes)
        self._scheduler.apply(Outcome(plan.iteration, tuple(failed)))
        for item in plan.passes:
            self._lost_in_engine(item.key, self._last_failure)

    def _lost_in_engine(self, key: BlockKey, message: str) -> None:
        lost = Lost(reason=LossReason(code="engine_error", message=message))
        self._gone(key, lost, lost.reason.code)

    def _report(self, progress: Progress, started: float, ended: float) -> None:
        """Turn what a pass did into the block's events."""
        key = progress.key
        tracked = self._tracked[key]
        waited, ran = started - tracked.since_seconds, ended - started
        queued = decoded = 0.0
        if not progress.is_first_here:
            decoded = waited + ran
        elif tracked.is_transferred:
            queued, decoded = tracked.reserve_seconds + waited, ran
        else:
            self._metrics.prefilled(waited, ran)
            event = Prefilled.model_construct(queue_seconds=waited, prefill_seconds=ran)
            self._outbox.append((key, event))
        tracked.since_seconds = ended
        if progress.counts:
            passed = PassRan.model_construct(
                step=progress.step,
                commits=progress.commits,
                carry=progress.carry,
                completion=progress.completion,
                queue_seconds=queued,
                decode_seconds=decoded,
            )
            self._outbox.append((key, passed))
        if progress.completion is not Completion.NOTHING:
            done = Completed.model_construct(num_passes=tracked.state.num_passes_here)
            self._gone(key, done, "completed")

    def _take_commands(self, *, is_idle: bool) -> None:
        """Carry out what was asked; an idle loop waits for it, or for the next deadline."""
        with self._inbox.books:
            seconds = self._expiries.seconds_left(self._clock())
        self._inbox.take(lambda: not self._is_stopping, waits=is_idle, wait_seconds=seconds)

    def _expire(self) -> None:
        now = self._clock()
        for key in self._expiries.pop_expired(now):
            tracked = self._tracked.get(key)
            if tracked is not None and tracked.expires_at <= now:
                reason = LossReason(code="deadline", message="the block's deadline has passed")
                self._lose(key, reason)

    def _flush(self) -> None:
        with self._inbox.books:
            self._note_status()
            batch, self._outbox = tuple(self._outbox), []
        if batch:
            self._publish(batch)

    def _note_status(self) -> None:
        scheduler = self._scheduler
        self._status = LoopStatus(
            free_pages=scheduler.pages.num_free,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_blocks=len(self._tracked),
            carried_tokens=scheduler.carried_tokens,
        )
        self._metrics.queues_are(
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            blocks=len(self._tracked),
            free_pages=scheduler.pages.num_free,
            carried_tokens=scheduler.carried_tokens,
        )

    # -- commands, carried out between two iterations ----------------------------------------

    def _ask_beside(self, answer: Callable[[], _ResultT]) -> "Future[_ResultT]":
        # A thread that has ended would never see what was changed.
        inbox = self._inbox
        return inbox.ask_at_once(answer) if self._thread.is_alive() else inbox.ask(answer)

    def _keep(self, tracked: TrackedBlock) -> None:
        self._tracked[tracked.state.key] = tracked
        self._expiries.add(tracked, self._tracked.values(), len(self._tracked))

    def _submit_now(self, tracked: TrackedBlock) -> None:
        self._scheduler.submit(tracked.state)
        self._keep(tracked)

    def _reserve_now(self, tracked: TrackedBlock) -> tuple[int, ...] | None:
        if not self._scheduler.reserve(tracked.state):
            return None
        tracked.is_pinned, tracked.reserve_seconds = True, self._clock() - tracked.since_seconds
        self._keep(tracked)
        return tracked.state.pages

    def _pin_now(self, key: BlockKey) -> tuple[int, ...] | None:
        tracked = self._tracked.get(key)
        if tracked is None or tracked.is_pinned or tracked.state.stage is not Stage.HOLDING:
            return None
        tracked.is_pinned = True
        return tracked.state.pages

    def _unpin_now(self, key: BlockKey) -> bool:
        """Unpin, and drop the block if it was doomed meanwhile; whether it is still here."""
        if (tracked := self._tracked.get(key)) is None:
            return False
        tracked.is_pinned = False
        if tracked.doom is not None:
            self._lose(key, tracked.doom)
            return False
        return True

    def _transfer_ended_now(self, key: BlockKey, result: Moved | LossReason, at: float) -> None:
        if not self._unpin_now(key):
            return
        tracked = self._tracked[key]
        if isinstance(result, LossReason):
            self._lose(key, result)
        elif tracked.state.stage is Stage.HOLDING:
            self._scheduler.remove(key)
            self._gone(key, KVSent(), "kv_sent")
        else:
            self._scheduler.arrived(key)
            tracked.since_seconds = at
            arrived = KVArrived(transfer_seconds=result.seconds, num_bytes=result.num_bytes)
            self._outbox.append((key, arrived))

    def _lose(self, key: BlockKey, reason: LossReason) -> None:
        if (tracked := self._tracked.get(key)) is None:
            return
        if tracked.is_pinned:
            tracked.doom = tracked.doom or reason
            return
        self._scheduler.remove(key)
        self._gone(key, Lost(reason=reason), reason.code)

    def _gone(self, key: BlockKey, last: BlockEvent, outcome: str) -> None:
        del self._tracked[key]
        self._outbox.append((key, last))
        self._metrics.block_left(outcome)

    def _hand_back_now(self, reason: LossReason) -> None:
        for key, tracked in tuple(self._tracked.items()):
            if tracked.state.stage is Stage.WAITING and not tracked.state.num_passes_here:
                self._lose(key, reason)

    def _drop_all_now(self, reason: LossReason) -> None:
        for key in tuple(self._tracked):
            self._lose(key, reason)

    def _set_tau_now(self, tau_tokens: int) -> None:
        self._scheduler.tau_tokens = tau_tokens
        self._scheduler.carried_tokens = 0
        self._metrics.pool_is(self._scheduler.pages.total_pages, tau_tokens)

    def _held_now(self) -> tuple[HeldBlock, ...]:
        return tuple(tracked.held() for tracked in self._tracked.values())

    def _stop_now(self) -> None:
        self._is_stopping = True
