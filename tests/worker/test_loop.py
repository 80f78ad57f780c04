"""The GPU thread by itself: order of events, deadlines, pins, failures, its end."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.worker.fakes import ToyEngine, ToyPool
from tests.worker.harness import DEADLINE_SECONDS, a_sequence

from sangam_core.decoding import Decoding, Resume
from sangam_core.wire import (
    BlockEvent,
    BlockKey,
    BlockStart,
    Completed,
    KVArrived,
    KVSent,
    LossReason,
    Lost,
    PassRan,
    Prefilled,
    WireGeometry,
)
from sangam_worker.block_state import BlockState, block_state_from
from sangam_worker.loop import EngineLoop, Notice
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.plan import Outcome, Plan
from sangam_worker.scheduler import Scheduler
from sangam_worker.tracking import Expiries, Moved, TrackedBlock

TOTAL_PAGES = 64
CANCELLED = LossReason(code="cancelled", message="a test")


class Journal:
    """Collects what the loop publishes, and lets a test wait for it."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.batches: list[Sequence[Notice]] = []
        self._changed = threading.Condition()

    def __call__(self, batch: Sequence[Notice]) -> None:
        with self._changed:
            self.batches.append(batch)
            self.notices += batch
            self._changed.notify_all()

    def of(self, key: BlockKey) -> list[BlockEvent]:
        return [event for each, event in self.notices if each == key]

    def await_event(self, key: BlockKey, kind: type[BlockEvent] | Any) -> Any:
        """Wait for a block's first event of a kind."""

        def found() -> list[BlockEvent]:
            return [event for event in self.of(key) if isinstance(event, kind)]

        with self._changed:
            assert self._changed.wait_for(lambda: bool(found()), DEADLINE_SECONDS), self.notices
        return found()[0]


class Clock:
    """Seconds that only a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A loop with what surrounds it."""

    def __init__(self, engine: ToyEngine | Any = None, **settings: Any) -> None:
        self.engine = engine or ToyEngine(kv_pool=ToyPool(TOTAL_PAGES))
        self.scheduler = Scheduler(mask_id=1, total_pages=TOTAL_PAGES, tau_tokens=1024)
        self.journal = Journal()
        self.metrics = WorkerMetrics()
        self.loop = EngineLoop(self.engine, self.scheduler, self.journal, self.metrics, **settings)

    def submit(self, state: BlockState, deadline_seconds: float = 600.0) -> BlockKey:
        self.loop.submit(state, deadline_seconds)
        return state.key

    def answered(self) -> None:
        """Wait until everything asked so far has been carried out."""
        self.loop.held().result(DEADLINE_SECONDS)

    @property
    def free_pages(self) -> int:
        self.answered()
        return self.scheduler.pages.num_free


@contextmanager
def a_bench(engine: ToyEngine | Any = None, **settings: Any) -> Iterator[Bench]:
    bench = Bench(engine, **settings)
    bench.loop.start()
    try:
        yield bench
    finally:
        assert bench.loop.stop(DEADLINE_SECONDS)


def a_state(request_id: str = "r", **changes: Any) -> BlockState:
    values: dict[str, Any] = {
        "key": BlockKey(request_id=request_id, block=0, attempt=1),
        "worker_epoch": "e",
        "arrival_seconds": 1.0,
        "ids": tuple(a_sequence()),
        "geometry": WireGeometry(prompt_tokens=20, num_blocks=2, block_length=16),
        "decoding": Decoding(),
    }
    return block_state_from(BlockStart(**values | changes), mask_id=1, vocab_size=500)


def a_transferred_state(request_id: str = "r", **changes: Any) -> BlockState:
    source: Any = {"worker_id": "w", "epoch": "e", "url": "http://x"}
    resume = Resume(step=1, initial_masks=16)
    return a_state(request_id, source=source, resume=resume, **changes)


def test_a_block_s_events_come_in_the_order_of_the_protocol() -> None:
    with a_bench() as bench:
        key = bench.submit(a_state())
        bench.journal.await_event(key, Completed)
        assert [type(event) for event in bench.journal.of(key)] == [
            Prefilled,
            PassRan,
            PassRan,
            Completed,
        ]


def test_an_iteration_s_events_are_published_in_one_batch() -> None:
    with a_bench() as bench:
        bench.engine.gate.clear()
        first = bench.submit(a_state("first"))
        others = [bench.submit(a_state(name)) for name in ("a", "b", "c")]
        bench.engine.gate.set()
        for key in (first, *others):
            bench.journal.await_event(key, Completed)
        together = [batch for batch in bench.journal.batches if len({key for key, _ in batch}) == 4]
        assert together, bench.journal.batches


def test_a_deadline_counts_from_the_submission_and_frees_the_pages() -> None:
    clock = Clock()
    with a_bench(clock=clock) as bench:
        key = bench.submit(a_state(hands_over=True), deadline_seconds=5.0)
        bench.journal.await_event(key, PassRan)
        assert bench.free_pages == TOTAL_PAGES - 4
        clock.now = 4.9
        assert bench.free_pages == TOTAL_PAGES - 4
        clock.now = 5.1
        bench.answered()  # wakes the idle loop, which had planned to sleep for longer
        assert bench.journal.await_event(key, Lost).reason.code == "deadline"
        assert bench.free_pages == TOTAL_PAGES


def test_deadlines_of_blocks_that_are_gone_do_not_pile_up() -> None:
    expiries = Expiries()
    live = TrackedBlock(a_state("live"), 0.0, expires_at=7.0, is_transferred=False)
    for number in range(1000):
        tracked = TrackedBlock(a_state(f"r{number}"), 0.0, expires_at=9.0, is_transferred=False)
        expiries.add(tracked, [live, tracked], num_live=2)
    assert len(expiries) < 100
    assert expiries.pop_expired(8.0) == [live.state.key]


def test_a_pinned_block_is_dropped_only_when_its_transfer_has_ended() -> None:
    with a_bench() as bench:
        key = bench.submit(a_state(hands_over=True))
        bench.journal.await_event(key, PassRan)
        pages = bench.loop.pin(key).result(DEADLINE_SECONDS)
        assert pages is not None
        assert len(pages) == 4
        assert bench.loop.pin(key).result(DEADLINE_SECONDS) is None, "it is being sent already"
        bench.loop.remove(key, CANCELLED)
        assert bench.free_pages == TOTAL_PAGES - 4
        bench.loop.transfer_ended(key, Moved(0.1, 10))
        assert bench.journal.await_event(key, Lost).reason == CANCELLED
        assert bench.free_pages == TOTAL_PAGES


def test_an_unpinned_block_can_be_sent_again() -> None:
    with a_bench() as bench:
        key = bench.submit(a_state(hands_over=True))
        bench.journal.await_event(key, PassRan)
        assert bench.loop.pin(key).result(DEADLINE_SECONDS)
        bench.loop.unpin(key)
        assert bench.loop.pin(key).result(DEADLINE_SECONDS)
        bench.loop.transfer_ended(key, Moved(0.1, 10))
        assert isinstance(bench.journal.await_event(key, KVSent), KVSent)
        assert bench.free_pages == TOTAL_PAGES


def test_only_a_held_block_can_be_pinned() -> None:
    with a_bench() as bench:
        unknown = BlockKey(request_id="unknown", block=0)
        assert bench.loop.pin(unknown).result(DEADLINE_SECONDS) is None
        bench.engine.gate.clear()
        running = bench.submit(a_state())
        asked = bench.loop.pin(running)
        bench.engine.gate.set()
        assert asked.result(DEADLINE_SECONDS) is None


def test_a_transfer_waits_for_no_iteration_at_either_end() -> None:
    """One at a time, transfers that did would move one block a pass, however many there are."""
    with a_bench() as bench:
        held = []
        for number in range(2):
            held.append(bench.submit(a_state(f"held {number}", hands_over=True)))
            bench.journal.await_event(held[-1], PassRan)
        bench.engine.gate.clear()
        running = bench.submit(a_state("running"))
        assert bench.engine.has_begun(2 + 1)
        assert all(bench.loop.pin(key).result(0) for key in held)
        bench.loop.unpin(held[0])
        assert bench.loop.pin(held[0]).result(0)
        arriving = a_transferred_state()
        assert bench.loop.reserve(arriving, 600.0).result(0)
        bench.loop.transfer_ended(arriving.key, Moved(0.25, 4096))
        assert bench.journal.of(running) == []
        bench.engine.gate.set()
        assert isinstance(bench.journal.await_event(arriving.key, Completed), Completed)


def test_a_reservation_gets_the_pages_that_were_given_back_before_it() -> None:
    """A full pool's blocks are dropped between two iterations: there is room only then."""
    with a_bench() as bench:
        held = [a_transferred_state(f"held {number}") for number in range(15)]
        for state in held:
            assert bench.loop.reserve(state, 600.0).result(0)
        bench.engine.gate.clear()
        bench.submit(a_state("running"))
        assert bench.engine.has_begun(1)
        bench.loop.transfer_ended(held[0].key, CANCELLED)
        asked = bench.loop.reserve(a_transferred_state("next"), 600.0)
        bench.engine.gate.set()
        assert asked.result(DEADLINE_SECONDS)


def test_an_unpinned_block_that_was_to_be_dropped_is_lost_at_once() -> None:
    with a_bench() as bench:
        key = bench.submit(a_state(hands_over=True))
        bench.journal.await_event(key, PassRan)
        assert bench.loop.pin(key).result(DEADLINE_SECONDS)
        bench.loop.remove(key, CANCELLED)
        bench.answered()
        bench.loop.unpin(key)
        assert bench.journal.await_event(key, Lost).reason == CANCELLED
        assert bench.free_pages == TOTAL_PAGES


def test_an_arriving_block_decodes_once_its_kv_is_here() -> None:
    with a_bench() as bench:
        state = a_transferred_state()
        assert bench.loop.reserve(state, 600.0).result(DEADLINE_SECONDS)
        assert bench.free_pages == TOTAL_PAGES - 4
        bench.loop.transfer_ended(state.key, Moved(0.25, 4096))
        done = bench.journal.await_event(state.key, Completed)
        assert done.num_passes == 2
        arrived = bench.journal.await_event(state.key, KVArrived)
        assert (arrived.transfer_seconds, arrived.num_bytes) == (0.25, 4096)
        assert not any(isinstance(event, Prefilled) for event in bench.journal.of(state.key))
        assert bench.free_pages == TOTAL_PAGES


class TickingEngine(ToyEngine):
    """Takes a second of the test's clock for each iteration.

    Attributes:
        at_start: what happens as an iteration begins, by its number from 1.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(kv_pool=ToyPool(TOTAL_PAGES))
        self.at_start: dict[int, Callable[[], object]] = {}
        self._clock = clock

    def execute(self, plan: Plan) -> Outcome:
        self.at_start.get(plan.iteration, lambda: None)()
        outcome = super().execute(plan)
        self._clock.now += 1.0
        return outcome


def test_passes_tell_how_long_a_moved_block_waited_and_how_long_each_took() -> None:
    clock = Clock()
    engine = TickingEngine(clock)
    running = a_state("running")
    waiting = a_state("waiting", arrival_seconds=2.0)
    moved = a_transferred_state("moved", arrival_seconds=3.0)
    with a_bench(engine, clock=clock) as bench:
        bench.loop.set_tau(16)  # one decode's rows, so a younger one that moves here must wait

        def more_comes() -> None:
            bench.submit(waiting)
            bench.loop.reserve(moved, 600.0)

        engine.at_start[1] = more_comes
        engine.at_start[2] = lambda: bench.loop.transfer_ended(moved.key, Moved(0.25, 4096))
        bench.submit(running)
        for state in (running, waiting, moved):
            bench.journal.await_event(state.key, Completed)
        prefilled = bench.journal.await_event(waiting.key, Prefilled)
    # The iterations, a second each: running; running; waiting; waiting and moved; moved.
    assert times(bench, running.key) == [(0.0, 0.0), (0.0, 1.0)]
    assert (prefilled.queue_seconds, prefilled.prefill_seconds) == (2.0, 1.0)
    assert times(bench, waiting.key) == [(0.0, 0.0), (0.0, 1.0)]
    parked = 2.0  # its KV came as the second iteration began
    assert times(bench, moved.key) == [(parked, 1.0), (0.0, 1.0)]


def test_waiting_for_pages_that_a_running_iteration_holds_up_counts_as_queueing() -> None:
    clock = Clock()
    engine = TickingEngine(clock)
    leaving, moved = a_transferred_state("leaving"), a_transferred_state("moved")
    with a_bench(engine, clock=clock) as bench:
        for number in range(14):
            assert bench.loop.reserve(a_transferred_state(f"held {number}"), 600.0).result(0)
        assert bench.loop.reserve(leaving, 600.0).result(0)

        def one_for_another() -> None:
            bench.loop.transfer_ended(leaving.key, CANCELLED)
            bench.loop.reserve(moved, 600.0)

        engine.at_start[1] = one_for_another
        engine.at_start[2] = lambda: bench.loop.transfer_ended(moved.key, Moved(0.25, 4096))
        bench.submit(a_state("running"))
        bench.journal.await_event(moved.key, Completed)
    reserved, parked = 1.0, 1.0
    assert times(bench, moved.key)[0] == (reserved + parked, 1.0)


def times(bench: Bench, key: BlockKey) -> list[tuple[float, float]]:
    """Of each pass of a block: seconds that it waited for, and that it took."""
    passes = (event for event in bench.journal.of(key) if isinstance(event, PassRan))
    return [(event.queue_seconds, event.decode_seconds) for event in passes]


def test_an_arriving_block_whose_transfer_failed_is_lost() -> None:
    with a_bench() as bench:
        state = a_transferred_state()
        assert bench.loop.reserve(state, 600.0).result(DEADLINE_SECONDS)
        failure = LossReason(code="transfer_failed", message="a test")
        bench.loop.transfer_ended(state.key, failure)
        assert bench.journal.await_event(state.key, Lost).reason == failure
        assert bench.free_pages == TOTAL_PAGES


def test_a_reservation_without_room_holds_nothing() -> None:
    with a_bench() as bench:
        held = [a_transferred_state(f"r{number}") for number in range(16)]
        for state in held:
            assert bench.loop.reserve(state, 600.0).result(DEADLINE_SECONDS)
        one_more = a_transferred_state("one more")
        assert bench.loop.reserve(one_more, 600.0).result(DEADLINE_SECONDS) is None
        assert len(bench.loop.held().result(DEADLINE_SECONDS)) == 16


def test_a_failed_iteration_costs_its_blocks_and_nothing_else() -> None:
    with a_bench() as bench:
        holding = bench.submit(a_state("holding", hands_over=True))
        bench.journal.await_event(holding, PassRan)
        bench.engine.failures.append(ValueError("out of memory"))
        failed = bench.submit(a_state("failed"))
        lost = bench.journal.await_event(failed, Lost)
        assert lost.reason.code == "engine_error"
        assert "out of memory" in lost.reason.message
        assert bench.free_pages == TOTAL_PAGES - 4
        assert bench.loop.pin(holding).result(DEADLINE_SECONDS)
        assert bench.loop.ailment() is None


def test_a_pass_that_fails_by_itself_costs_its_block_and_no_other() -> None:
    with a_bench(max_engine_failures=1) as bench:
        bench.engine.poison.add("bad")
        bench.engine.gate.clear()
        blocks = [bench.submit(a_state(name)) for name in ("first", "bad", "good")]
        bench.engine.gate.set()
        bench.journal.await_event(blocks[2], Completed)
        lost = bench.journal.await_event(blocks[1], Lost)
        assert (lost.reason.code, lost.reason.message) == ("engine_error", "not numbers")
        bench.journal.await_event(blocks[0], Completed)
        assert bench.free_pages == TOTAL_PAGES
        assert bench.loop.ailment() is None


def test_failures_in_a_row_make_the_loop_sick_and_a_success_heals_it() -> None:
    with a_bench(max_engine_failures=2) as bench:
        bench.engine.failures += [ValueError("one"), ValueError("two")]
        for name in ("a", "b"):
            bench.journal.await_event(bench.submit(a_state(name)), Lost)
        assert "ValueError: two" in str(bench.loop.ailment())
        bench.journal.await_event(bench.submit(a_state("c")), Completed)
        assert bench.loop.ailment() is None


class LyingEngine:
    """Returns outcomes that no plan asked for: a bug, not a failure of the device."""

    def execute(self, plan: Plan) -> Outcome:
        return Outcome(plan.iteration + 7, ())


def test_a_bug_ends_the_thread_loses_every_block_and_says_so() -> None:
    bench = Bench(LyingEngine())
    bench.loop.start()
    key = bench.submit(a_state())
    assert bench.journal.await_event(key, Lost).reason.code == "engine_error"
    assert bench.loop.stop(DEADLINE_SECONDS)
    assert bench.loop.ailment() == "the GPU thread does not run"


def test_only_blocks_that_wait_for_their_first_pass_are_handed_back() -> None:
    with a_bench() as bench:
        holding = bench.submit(a_state("holding", hands_over=True))
        bench.journal.await_event(holding, PassRan)
        bench.engine.gate.clear()
        running = bench.submit(a_state("running"))
        assert bench.engine.has_begun(2)
        waiting = bench.submit(a_state("waiting"))
        bench.loop.hand_back_waiting(LossReason(code="role_changed", message="a test"))
        bench.engine.gate.set()
        assert bench.journal.await_event(waiting, Lost).reason.code == "role_changed"
        bench.journal.await_event(running, Completed)
        assert [block.key for block in bench.loop.held().result(DEADLINE_SECONDS)] == [holding]


def test_a_new_budget_forgets_what_was_carried() -> None:
    with a_bench() as bench:
        bench.loop.set_tau(99)
        bench.answered()
        assert (bench.scheduler.tau_tokens, bench.scheduler.carried_tokens) == (99, 0)


def test_removing_what_is_not_here_changes_nothing() -> None:
    with a_bench() as bench:
        bench.loop.remove(BlockKey(request_id="unknown", block=0), CANCELLED)
        bench.answered()
        assert bench.journal.notices == []
