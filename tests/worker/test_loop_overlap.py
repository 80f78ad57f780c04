"""What the GPU thread does while the device works, in which order, and the gap that is left."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.worker.fakes import ToyEngine, ToyLaunched, ToyPool
from tests.worker.harness import DEADLINE_SECONDS
from tests.worker.loop_bench import (
    CANCELLED,
    TOTAL_PAGES,
    Clock,
    TickingEngine,
    a_bench,
    a_state,
    a_transferred_state,
    full_pool,
)

from sangam_core.wire import Completed, Lost, PassRan, Prefilled
from sangam_worker.block_state import Stage
from sangam_worker.plan import Plan
from sangam_worker.reporting import Notice
from sangam_worker.tracking import Moved


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


def test_what_comes_while_the_device_works_is_taken_in_beside_it() -> None:
    """The device would have to wait for it between two iterations."""
    with a_bench() as bench:
        bench.engine.gate.clear()
        running = bench.submit(a_state("running"))
        assert bench.engine.has_begun(1)
        waiting, moved = a_state("waiting"), a_transferred_state("moved")
        bench.submit(waiting)
        assert bench.loop.reserve(moved, 600.0).result(0)
        bench.loop.transfer_ended(moved.key, Moved(0.25, 4096))
        assert (waiting.stage, moved.stage) == (Stage.WAITING, Stage.PARKED)
        assert bench.scheduler.keys() == (running, waiting.key, moved.key)
        assert bench.journal.notices == []
        bench.engine.gate.set()
        for state in (waiting, moved):
            bench.journal.await_event(state.key, Completed)


def test_whoever_gets_an_answer_may_ask_for_more_at_once() -> None:
    """An answer's callback runs on the GPU thread, between two iterations: the books are held."""
    with a_bench() as bench:
        full_pool(bench)
        arriving = a_transferred_state("arriving")
        asked = bench.loop.reserve(arriving, 600.0)
        asked.add_done_callback(lambda _: bench.loop.transfer_ended(arriving.key, Moved(0.1, 10)))
        assert not asked.done()
        bench.engine.gate.set()
        bench.journal.await_event(arriving.key, Completed)


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
