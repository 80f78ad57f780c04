"""A worker under virtual time: the real scheduler, and a cost model in the engine's place.

Decides when iterations begin and end, what they commit (as many masks as the block's commit
counts say, leftmost first) and how transfers take time from them. Who runs is the scheduler's
decision. Called by ``driver``; reports each iteration's progress to it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from sangam_core.decoding import Commit
from sangam_core.placement import Role
from sangam_core.wire import BlockKey
from sangam_loadtest.costs.batch import PassBatch
from sangam_loadtest.simulator.clock import VirtualClock
from sangam_loadtest.simulator.tokens import EOS_ID, WORD_ID
from sangam_worker.block_state import BlockState
from sangam_worker.plan import Outcome, Pass, PassOutcome, Plan
from sangam_worker.scheduler import Progress, Scheduler

Costs = Callable[[PassBatch], float]
"""Seconds of an iteration."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration that has run, for figures of time against batch."""

    worker: int
    started_seconds: float
    seconds: float
    batch: PassBatch


Report = Callable[[int, Progress, float, float], None]
"""Told the worker, what a pass did, and when its iteration started and ended."""


@dataclass(slots=True)
class BlockFuture:
    """What the engine stand-in will commit in a block.

    Attributes:
        counts: commits by pass, the prefill's first.
        stop: position behind the answer's last token; that token counts as the end token.
    """

    counts: Sequence[int]
    stop: int


class SimulatedWorker:
    """A worker.

    Args:
        report: called for each pass of an iteration when it has ended.
        watch: sees every iteration, if given.
    """

    def __init__(
        self,
        number: int,
        role: Role,
        scheduler: Scheduler,
        costs: Costs,
        clock: VirtualClock,
        report: Report,
        watch: Callable[[Iteration], None] | None = None,
    ) -> None:
        self.number = number
        self.role = role
        self.scheduler = scheduler
        self.busy_seconds = 0.0
        self._costs = costs
        self._clock = clock
        self._report = report
        self._watch = watch
        self._futures: dict[BlockKey, BlockFuture] = {}
        self._owed_seconds = 0.0
        self._free_from = 0.0
        self._transfers: deque[tuple[float, Callable[[], None]]] = deque()
        self._is_running = False
        self._is_woken = False

    # -- what the driver does to it -----------------------------------------------------------

    def submit(self, state: BlockState, future: BlockFuture) -> None:
        """Queue a block's prefill."""
        self._futures[state.key] = future
        self.scheduler.submit(state)
        self._wake()

    def reserve(self, state: BlockState, future: BlockFuture) -> None:
        """Take pages for a block whose KV will come; the ledger has seen that they are free."""
        has_pages = self.scheduler.reserve(state)
        assert has_pages, f"worker {self.number}: the ledger reserved pages that are not there"
        self._futures[state.key] = future

    def arrived(self, key: BlockKey) -> None:
        """A block's KV is here."""
        self.scheduler.arrived(key)
        self._wake()

    def remove(self, key: BlockKey) -> None:
        """A block's KV has left."""
        self.scheduler.remove(key)
        del self._futures[key]
        self._wake()

    def block(self, seconds: float, done: Callable[[], None]) -> None:
        """A blocking transfer: once no pass runs here, nothing but it does for ``seconds``.

        In order of asking, and before the next pass. The other side is not waited for: a sender
        and a receiver that met would idle besides.
        """
        self._transfers.append((seconds, done))
        self._wake()

    def take_time(self, seconds: float) -> None:
        """A transfer beside passes takes compute time of the next one, or of idleness first."""
        if self._is_running:
            self._owed_seconds += seconds
        else:
            self._free_from = max(self._free_from, self._clock.now) + seconds

    # -- iterations ---------------------------------------------------------------------------

    def _wake(self) -> None:
        """Plan at this moment, but after everything else that happens at it: what arrives
        together is planned together."""
        if not self._is_running and not self._is_woken:
            self._is_woken = True
            self._clock.after(0.0, self._begin)

    def _begin(self) -> None:
        self._is_woken = False
        if self._is_running:
            return
        if self._transfers:
            self._begin_transfer()
            return
        plan = self.scheduler.next_plan()
        if plan is None:
            # What is still owed passes while nothing runs.
            self._free_from = max(self._free_from, self._clock.now) + self._owed_seconds
            self._owed_seconds = 0.0
            return
        batch = batch_of(plan)
        started = self._clock.now
        seconds = self._costs(batch) + self._owed_seconds + max(0.0, self._free_from - started)
        self._owed_seconds = 0.0
        self._is_running = True
        if self._watch is not None:
            self._watch(Iteration(self.number, started, seconds, batch))
        self._clock.after(seconds, lambda: self._end(plan, started))

    def _begin_transfer(self) -> None:
        seconds, done = self._transfers.popleft()
        self._is_running = True
        self._clock.after(seconds, lambda: self._end_transfer(seconds, done))

    def _end_transfer(self, seconds: float, done: Callable[[], None]) -> None:
        self._is_running = False
        self.busy_seconds += seconds
        self._wake()
        done()

    def _end(self, plan: Plan, started: float) -> None:
        self._is_running = False
        outcomes = tuple(self._outcome(item) for item in plan.passes)
        ended = self._clock.now
        self.busy_seconds += ended - started
        for progress in self.scheduler.apply(Outcome(plan.iteration, outcomes)):
            if progress.stage is None:
                del self._futures[progress.key]
            self._report(self.number, progress, started, ended)
        self._wake()

    def _outcome(self, item: Pass) -> PassOutcome:
        future = self._futures[item.key]
        count = future.counts[item.step]
        first = item.masked[0]
        last = future.stop - 1
        if first <= last < first + count:
            commits = tuple(_commit(p, p == last) for p in range(first, first + count))
        else:
            commits = tuple([_commit(p, False) for p in range(first, first + count)])
        return PassOutcome(item.key, commits)


@lru_cache(maxsize=65536)
def _commit(position: int, is_end: bool) -> Commit:
    return Commit(position=position, token=EOS_ID if is_end else WORD_ID)


def batch_of(plan: Plan) -> PassBatch:
    """What an iteration costs depends on: rows, keys and pairs of them."""
    num_decodes = decode_rows = decode_keys = decode_row_keys = 0
    num_prefills = prefill_rows = prefill_square_rows = head_rows = 0
    for item in plan.passes:
        rows = len(item.positions)
        head_rows += len(item.masked)
        if item.is_whole_sequence:
            num_prefills += 1
            prefill_rows += rows
            prefill_square_rows += rows * rows
        else:
            num_decodes += 1
            decode_rows += rows
            decode_keys += item.sees
            decode_row_keys += rows * item.sees
    return PassBatch(
        num_decodes=num_decodes,
        decode_rows=decode_rows,
        decode_keys=decode_keys,
        decode_row_keys=decode_row_keys,
        num_prefills=num_prefills,
        prefill_rows=prefill_rows,
        prefill_square_rows=prefill_square_rows,
        head_rows=head_rows,
    )
