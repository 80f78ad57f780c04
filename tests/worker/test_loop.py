"""The GPU thread by itself: order of events, deadlines, pins, failures, its end."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from tests.worker.fakes import ToyEngine, ToyLaunched, ToyPool
from tests.worker.harness import DEADLINE_SECONDS, a_sequence

from sangam_core.decoding import Decoding, Resume
from sangam_core.errors import ConfigurationError, EngineError
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
from sangam_worker.loop import EngineLoop
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.plan import Outcome, Plan
from sangam_worker.reporting import Notice
from sangam_worker.scheduler import Scheduler
from sangam_worker.tracking import Expiries, Moved, TrackedBlock

TOTAL_PAGES = 64
CANCELLED = LossReason(code="cancelled", message="a test")


class Journal:
    """Collects what the loop publishes, and lets a test wait for it.

    Attributes:
        look: called with each batch before it is collected.
    """

    def __init__(self) -> None:
        self.look: Callable[[Sequence[Notice]], object] = lambda batch: None
        self.notices: list[Notice] = []
        self.batches: list[Sequence[Notice]] = []
        self._changed = threading.Condition()

    def __call__(self, batch: Sequence[Notice]) -> None:
        self.look(batch)
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

    def sample(self, name: str, **labels: str) -> float | None:
        """A metric of the worker as it stands."""
        return self.metrics.registry.get_sample_value(f"sangam_worker_{name}", labels)

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


def test_the_thread_is_prepared_when_it_has_started() -> None:
    names: list[str] = []
    with a_bench(prepare=lambda: names.append(threading.current_thread().name)) as bench:
        assert names == ["gpu"]
        bench.journal.await_event(bench.submit(a_state()), Completed)
    assert names == ["gpu"]


def test_a_thread_that_cannot_be_prepared_does_not_start() -> None:
    def prepare() -> None:
        raise ConfigurationError("the model does not work")

    bench = Bench(prepare=prepare)
    with pytest.raises(ConfigurationError, match="the model does not work"):
        bench.loop.start()
    assert bench.loop.stop(DEADLINE_SECONDS)
    assert bench.engine.num_iterations == 0


def test_a_device_that_hangs_while_the_thread_is_prepared_ends_the_start() -> None:
    gate = threading.Event()
    bench = Bench(prepare=lambda: _passed(gate), prepare_seconds=0.02)
    with pytest.raises(EngineError, match=r"not ready after 0.02 s"):
        bench.loop.start()
    gate.set()
    assert bench.loop.stop(DEADLINE_SECONDS)


def _passed(gate: threading.Event) -> None:
    assert gate.wait(DEADLINE_SECONDS)


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

    def __init__(self, clock: Clock, device_seconds: float | None = None) -> None:
        super().__init__(kv_pool=ToyPool(TOTAL_PAGES), device_seconds=device_seconds)
        self.at_start: dict[int, Callable[[], object]] = {}
        self._clock = clock

    def finish(self, plan: Plan) -> Outcome:
        self.at_start.get(plan.iteration, lambda: None)()
        outcome = super().finish(plan)
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

    device_seconds = None

    def launch(self, plan: Plan) -> "LyingEngine":
        return self

    def outcome(self) -> Outcome:
        return Outcome(7, ())


def test_a_bug_ends_the_thread_loses_every_block_and_says_so() -> None:
    bench = Bench(LyingEngine())
    bench.loop.start()
    key = bench.submit(a_state())
    reason = bench.journal.await_event(key, Lost).reason
    assert (reason.code, reason.message) == ("engine_error", "the worker's GPU thread has ended")
    assert bench.loop.stop(DEADLINE_SECONDS)
    assert bench.loop.ailment() == "the GPU thread does not run"


# -- overlap: what happens while the device works -----------------------------------------------


class WatchedEngine(ToyEngine):
    """Tells of its launches, and can take its time over them.

    Attributes:
        at_launch: what happens as an iteration is launched, by its number from 1.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(kv_pool=ToyPool(TOTAL_PAGES), **settings)
        self.at_launch: dict[int, Callable[[], object]] = {}

    def launch(self, plan: Plan) -> ToyLaunched:
        self.at_launch.get(plan.iteration, lambda: None)()
        return super().launch(plan)


def test_an_iteration_s_events_are_out_while_the_device_works_on_the_next() -> None:
    engine = WatchedEngine(closes_after=1)
    with a_bench(engine) as bench:
        seen_at_launch: list[int] = []
        engine.at_launch[2] = lambda: seen_at_launch.append(len(bench.journal.notices))
        key = bench.submit(a_state())
        bench.journal.await_event(key, PassRan)
        assert not engine.gate.is_set()
        assert engine.is_under_way
        assert seen_at_launch == [0], "the device had its work first"
        assert [type(event) for event in bench.journal.of(key)] == [Prefilled, PassRan]
        engine.gate.set()


def test_an_idle_loop_keeps_nothing_back() -> None:
    with a_bench() as bench:
        key = bench.submit(a_state(hands_over=True))
        bench.journal.await_event(key, PassRan)
        assert bench.engine.num_iterations == 1


def test_whoever_has_seen_an_event_finds_it_counted() -> None:
    counted: dict[str, float | None] = {}
    with a_bench() as bench:

        def look(batch: Sequence[Notice]) -> None:
            for _, event in batch:
                for name in ("iterations_total", "committed_tokens_total", "prefill_seconds_count"):
                    counted[f"{event.type} {name}"] = bench.sample(name)
                counted[f"{event.type} blocks"] = bench.sample("blocks")
                completed = bench.sample("block_outcomes_total", outcome="completed")
                counted[f"{event.type} completed"] = completed

        bench.journal.look = look
        bench.journal.await_event(bench.submit(a_state()), Completed)
    assert counted["prefilled prefill_seconds_count"] == 1
    assert (counted["prefilled iterations_total"], counted["prefilled blocks"]) == (1, 1)
    assert (counted["pass committed_tokens_total"], counted["completed iterations_total"]) == (
        16,
        2,
    )
    assert (counted["completed completed"], counted["completed blocks"]) == (1, 0)


def test_a_block_that_is_removed_behind_a_pass_hears_of_the_pass_first() -> None:
    engine = WatchedEngine()
    engine.commits_per_pass = 1
    with a_bench(engine) as bench:
        state, other = a_state("removed"), a_state("other")
        engine.gate.clear()
        for each in (state, other):
            bench.submit(each)
        assert engine.has_begun(1)
        bench.loop.remove(state.key, CANCELLED)
        pages_free: list[int] = []
        engine.at_launch[2] = lambda: pages_free.append(bench.scheduler.pages.num_free)
        engine.gate.set()
        bench.journal.await_event(other.key, Completed)
        # Both as the loop was told of them, and the first one's pages were free by then.
        assert [type(e) for e in bench.journal.of(state.key)] == [Prefilled, PassRan, Lost]
        assert pages_free == [TOTAL_PAGES - 4]


def test_a_finished_block_has_no_pass_more() -> None:
    ran: list[list[str]] = []

    class Listed(WatchedEngine):
        def launch(self, plan: Plan) -> ToyLaunched:
            ran.append([item.key.request_id for item in plan.passes])
            return super().launch(plan)

    engine = Listed()
    with a_bench(engine) as bench:
        engine.gate.clear()
        first = bench.submit(a_state("first"))
        assert engine.has_begun(1)
        second = bench.submit(a_state("second", arrival_seconds=2.0))
        engine.gate.set()
        for key in (first, second):
            bench.journal.await_event(key, Completed)
    assert ran == [["first"], ["first", "second"], ["second"]]


def test_a_failed_launch_costs_its_blocks_behind_the_events_of_the_pass_before() -> None:
    engine = WatchedEngine()
    with a_bench(engine, max_engine_failures=2) as bench:
        holding = bench.submit(a_state("holding", hands_over=True))
        bench.journal.await_event(holding, PassRan)
        engine.at_launch[3] = lambda: engine.launch_failures.append(ValueError("no memory"))
        failed = bench.submit(a_state("failed"))
        lost = bench.journal.await_event(failed, Lost)
        assert (lost.reason.code, "no memory" in lost.reason.message) == ("engine_error", True)
        assert [type(e) for e in bench.journal.of(failed)] == [Prefilled, PassRan, Lost]
        assert bench.free_pages == TOTAL_PAGES - 4
        bench.journal.await_event(bench.submit(a_state("next")), Completed)
        assert bench.loop.ailment() is None


def test_blocks_that_wait_behind_a_failed_launch_run_without_being_asked_for() -> None:
    engine = WatchedEngine()
    with a_bench(engine) as bench:
        bench.loop.set_tau(36)  # one prefill of 52 rows by the idle rule, one at a time
        engine.gate.clear()
        first = bench.submit(a_state("first", hands_over=True))
        assert engine.has_begun(1)
        engine.at_launch[2] = lambda: engine.launch_failures.append(ValueError("no memory"))
        second, third = (bench.submit(a_state(name)) for name in ("second", "third"))
        engine.gate.set()
        bench.journal.await_event(second, Lost)
        bench.journal.await_event(third, Completed)
        assert bench.loop.pin(first).result(DEADLINE_SECONDS)


def test_a_launch_and_a_wait_that_take_too_long_are_both_a_stall() -> None:
    clock = Clock()
    engine = WatchedEngine()
    is_launching, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        is_launching.set()
        assert goes_on.wait(DEADLINE_SECONDS)

    with a_bench(engine, clock=clock, stall_seconds=5.0) as bench:
        engine.at_launch[1] = hang
        engine.gate.clear()
        key = bench.submit(a_state())
        assert is_launching.wait(DEADLINE_SECONDS)
        clock.now = 5.5
        assert "more than 5 s" in str(bench.loop.ailment())
        goes_on.set()
        assert engine.has_begun(1)
        assert "more than 5 s" in str(bench.loop.ailment()), "the device still works on it"
        engine.gate.set()
        bench.journal.await_event(key, Completed)
        clock.now = 50.0
        assert bench.loop.ailment() is None


def test_the_gap_is_what_the_device_waits_for_between_iterations_and_no_idleness() -> None:
    clock = Clock()
    engine = WatchedEngine()
    with a_bench(engine, clock=clock) as bench:

        def takes(seconds: float) -> None:
            clock.now += seconds

        for iteration in range(1, 5):
            engine.at_launch[iteration] = lambda: takes(0.25)
        # Told beside the device, so that what readers take is none of its waiting.
        bench.journal.look = lambda batch: takes(8.0)
        bench.journal.await_event(bench.submit(a_state("a")), Completed)
        bench.answered()
        assert (bench.sample("gap_seconds_count"), bench.sample("gap_seconds_sum")) == (1, 0.25)
        clock.now += 100.0
        bench.journal.await_event(bench.submit(a_state("b")), Completed)
        bench.answered()
        assert (bench.sample("gap_seconds_count"), bench.sample("gap_seconds_sum")) == (2, 0.5)
        assert bench.sample("iteration_seconds_count") == 4


def test_the_gap_of_a_device_that_tells_how_long_it_worked_is_the_rest_of_the_time() -> None:
    clock = Clock()
    with a_bench(TickingEngine(clock, device_seconds=0.75), clock=clock) as bench:
        bench.journal.await_event(bench.submit(a_state()), Completed)
        bench.answered()
        # The second iteration: a second from outcome to outcome, and the host late by a quarter.
        assert (bench.sample("gap_seconds_count"), bench.sample("gap_seconds_sum")) == (1, 0.25)


def test_no_gap_is_counted_behind_a_failure() -> None:
    engine = WatchedEngine(closes_after=1)
    with a_bench(engine) as bench:
        engine.at_launch[2] = lambda: engine.failures.append(ValueError("one"))
        failed = bench.submit(a_state("failed"))
        assert engine.has_begun(2)
        next_one = bench.submit(a_state("next", hands_over=True))
        engine.gate.set()
        bench.journal.await_event(failed, Lost)
        bench.journal.await_event(next_one, PassRan)
        assert bench.sample("iterations_total") == 2
        assert bench.sample("gap_seconds_count") == 0


# -- roles, budgets, removals -------------------------------------------------------------------


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
