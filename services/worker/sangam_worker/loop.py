"""The GPU thread: owns scheduler and engine, runs iteration after iteration.

Everything else asks through thread-safe methods that return at once. They are carried out between
two iterations, and beside a running one where no plan names the block (or the next gap would be the
longer for it): what comes, and what transfers need. Decides the order of an iteration, for as
short a gap as can be: from one outcome to the next launch the device waits, so that events, metrics
and whatever else the next plan does not need come after the launch, beside the device's work.

The plan itself comes of the outcome. Where the same blocks pass again, all but their tokens is kept
(rows by the block, index arrays by the graphs), and one that was made before would be right, as
no finished block may pass once more, only where blocks come and none ends: in no iteration of a
decode worker's steady state, and with 8, 32 and 64 blocks in 12, 4 and 0.5 % of a colocated one's
(``benchmarks.host_gap``'s cases).

What an iteration means for blocks ``books`` decides, who may run the scheduler, who may come the
service. The thread never awaits, the event loop never touches tensors.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import structlog

from sangam_core.errors import EngineError
from sangam_core.wire import BlockKey, HeldBlock, LossReason
from sangam_worker.block_state import BlockState
from sangam_worker.books import Books
from sangam_worker.inbox import Inbox
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.plan import Launched, Plan
from sangam_worker.reporting import Publish, Reporter
from sangam_worker.scheduler import Scheduler
from sangam_worker.tracking import LoopStatus, Moved, TrackedBlock

_ResultT = TypeVar("_ResultT")

log = structlog.get_logger(__name__)


class Executes(Protocol):
    """The engine, as far as the loop knows it."""

    def launch(self, plan: Plan) -> Launched:
        """Hand an iteration to the device; returns as soon as the device has its work."""
        ...


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """An iteration that the device works on.

    Attributes:
        started: when it was given to the engine. launched_at: when the engine had handed it on.
        ready_at: when the outcome before it came; ``None`` behind idleness or a failure.
    """

    plan: Plan
    launched: Launched
    started: float
    launched_at: float
    ready_at: float | None

    def gap_seconds(self, ended: float, device_seconds: float | None) -> float | None:
        """How long the device stood still since the outcome before; ``None`` without one.

        Where the device does not tell how long it worked, the time until it was launched.
        """
        if self.ready_at is None:
            return None
        if device_seconds is None:
            return self.launched_at - self.ready_at
        return max(0.0, ended - self.ready_at - device_seconds)


class EngineLoop:
    """The thread that computes.

    Args:
        publish: takes each batch of events (called on the thread).
        clock: monotonic seconds.
        max_engine_failures: failed iterations in a row that make the loop unhealthy.
        stall_seconds: an iteration longer than this makes the loop unhealthy.
        prepare: run on the thread before anything else. Libraries keep some of what they make by
            thread (cuBLAS its handle, with tens of MiB), so that a warm-up elsewhere is not enough.
        prepare_seconds: longest time for that.
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
        prepare: Callable[[], None] = lambda: None,
        prepare_seconds: float = 300.0,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._metrics = metrics
        self._clock = clock
        self._max_engine_failures = max_engine_failures
        self._stall_seconds = stall_seconds
        self._prepare, self._prepare_seconds = prepare, prepare_seconds
        self._prepared: Future[None] = Future()
        self._inbox = Inbox()
        self._books = Books(scheduler, clock)
        self._reporter = Reporter(publish, metrics)
        self._num_failures = 0
        self._last_failure = ""
        self._busy_since: float | None = None
        self._landed_at: float | None = None
        self._to_count: Callable[[], None] | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="gpu", daemon=True)
        self._status = self._books.status()
        metrics.pool_is(scheduler.pages.total_pages, scheduler.tau_tokens)
        metrics.queues_are(self._status)

    # -- from any thread ------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; returns when it is prepared.

        Raises:
            EngineError: that takes longer than ``prepare_seconds``.
            Exception: what it ended with.
        """
        self._thread.start()
        done, _ = wait([self._prepared], self._prepare_seconds)
        if not done:
            raise EngineError(
                f"the GPU thread was not ready after {self._prepare_seconds:g} s: its device hangs"
            )
        self._prepared.result()

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
        self._put_beside(partial(self._books.submit, tracked))

    def reserve(
        self, state: BlockState, deadline_seconds: float
    ) -> "Future[tuple[int, ...] | None]":
        """Reserve a block's pages for KV that will arrive: the pages, ``None`` without room.

        The block is pinned until ``transfer_ended``.
        """
        now = self._clock()
        tracked = TrackedBlock(state, now, now + deadline_seconds, is_transferred=True)
        return self._ask_beside(partial(self._books.reserve, tracked))

    def pin(self, key: BlockKey) -> "Future[tuple[int, ...] | None]":
        """Pin a held block's pages for sending until ``transfer_ended``.

        ``None`` when the block is not held here, or is being sent already.
        """
        return self._ask_beside(partial(self._books.pin, key))

    def unpin(self, key: BlockKey) -> None:
        """Take a pin back: the transfer was not begun, the block waits on."""
        self._ask_beside(partial(self._books.unpin, key))

    def transfer_ended(self, key: BlockKey, result: Moved | LossReason) -> None:
        """Unpin a block. No thread reads or writes its pages any more."""
        ended = partial(self._books.transfer_ended, key, result, self._clock())
        if isinstance(result, Moved):
            self._put_beside(ended)
        else:
            self._inbox.put(ended)

    def remove(self, key: BlockKey, reason: LossReason) -> None:
        """Drop a block, at once or when its transfer has ended. Unknown keys change nothing."""
        self._inbox.put(partial(self._books.lose, key, reason))

    def hand_back_waiting(self, reason: LossReason) -> None:
        """Drop every block that waits for its first pass."""
        self._inbox.put(partial(self._books.hand_back_waiting, reason))

    def drop_all(self, reason: LossReason) -> None:
        """Drop every block; pinned ones when their transfers have ended."""
        self._inbox.put(partial(self._books.drop_all, reason))

    def set_tau(self, tau_tokens: int) -> None:
        """Change the token budget of an iteration; what was carried is forgotten."""
        self._inbox.put(partial(self._set_tau_now, tau_tokens))

    def held(self) -> "Future[tuple[HeldBlock, ...]]":
        """Every block here."""
        return self._inbox.ask(self._books.held)

    # -- on the thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception as error:  # noqa: BLE001 - whoever waits gets it
            self._prepared.set_exception(error)
            return
        self._prepared.set_result(None)
        self._iterate()

    def _iterate(self) -> None:
        try:
            while not self._is_stopping:
                with self._inbox.lock:
                    plan = self._scheduler.next_plan()
                if plan is None:
                    self._note_idleness()
                under_way = None if plan is None else self._launch(plan)
                self._tell()
                if under_way is not None:
                    self._land(under_way)
                self._take_commands(is_idle=plan is None)
            self._note_idleness()
            self._tell()
        except Exception:
            log.exception("the GPU thread has ended by a bug")
            reason = LossReason(code="engine_error", message="the worker's GPU thread has ended")
            self._reporter.tell(self._books.lost_by_end(reason))

    def _launch(self, plan: Plan) -> _UnderWay | None:
        """Hand an iteration to the device; ``None`` when that failed."""
        started = self._busy_since = self._clock()
        try:
            launched = self._engine.launch(plan)
        except Exception as error:  # noqa: BLE001 - whatever a device throws
            self._engine_failed(plan, error)
            return None
        return _UnderWay(plan, launched, started, self._clock(), self._landed_at)

    def _land(self, under_way: _UnderWay) -> None:
        """Wait for an iteration and take in what it did."""
        plan, started = under_way.plan, under_way.started
        try:
            outcome = under_way.launched.outcome()
            device_seconds = under_way.launched.device_seconds
        except Exception as error:  # noqa: BLE001 - whatever a device throws
            self._engine_failed(plan, error)
            return
        ended = self._landed_at = self._clock()
        self._busy_since = None
        self._num_failures = 0
        with self._inbox.lock:
            committed_tokens = self._books.take_in(outcome, started, ended)
            self._status = self._books.status()
        gap_seconds = under_way.gap_seconds(ended, device_seconds)
        self._to_count = partial(
            self._metrics.iteration_ran, plan, ended - started, committed_tokens, gap_seconds
        )

    def _engine_failed(self, plan: Plan, error: Exception) -> None:
        self._busy_since = self._landed_at = None
        self._last_failure = f"{type(error).__name__}: {error}"
        self._num_failures += 1
        self._metrics.iteration_failed()
        log.error("iteration failed", iteration=plan.iteration, exc_info=error)
        with self._inbox.lock:
            self._books.iteration_failed(plan, self._last_failure)
            self._status = self._books.status()

    def _note_idleness(self) -> None:
        """Nothing can run: no gap is counted, and what commands have changed is seen."""
        self._landed_at = None
        with self._inbox.lock:
            self._status = self._books.status()

    def _tell(self) -> None:
        """Say what has happened: while the device works, or when there is nothing for it.

        Counts come first, so that whoever has seen an event finds it counted.
        """
        with self._inbox.lock:
            happened = self._books.take_happened()
        if self._to_count is not None:
            self._to_count()
            self._to_count = None
        self._metrics.queues_are(self._status)
        self._reporter.tell(happened)

    def _take_commands(self, *, is_idle: bool) -> None:
        """Carry out what was asked and what is due; an idle loop waits for either."""
        seconds = None
        if is_idle:
            with self._inbox.lock:
                seconds = self._books.seconds_to_expiry()
        self._inbox.take(lambda: not self._is_stopping, waits=is_idle, wait_seconds=seconds)
        with self._inbox.lock:
            self._books.expire()

    def _ask_beside(self, answer: Callable[[], _ResultT]) -> "Future[_ResultT]":
        # A thread that has ended would never see what was changed.
        inbox = self._inbox
        return inbox.ask_at_once(answer) if self._thread.is_alive() else inbox.ask(answer)

    def _put_beside(self, command: Callable[[], object]) -> None:
        inbox = self._inbox
        (inbox.put_at_once if self._thread.is_alive() else inbox.put)(command)

    def _set_tau_now(self, tau_tokens: int) -> None:
        self._books.set_tau(tau_tokens)
        self._metrics.pool_is(self._scheduler.pages.total_pages, tau_tokens)

    def _stop_now(self) -> None:
        self._is_stopping = True
