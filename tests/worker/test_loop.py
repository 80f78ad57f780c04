"""The GPU thread by itself: its start and end, order of events, deadlines, failures, removals."""

import threading

import pytest
from tests.worker.harness import DEADLINE_SECONDS
from tests.worker.loop_bench import CANCELLED, TOTAL_PAGES, Bench, Clock, a_bench, a_state

from sangam_core.errors import ConfigurationError, EngineError
from sangam_core.wire import BlockKey, Completed, LossReason, Lost, PassRan, Prefilled
from sangam_worker.plan import Outcome, Plan
from sangam_worker.tracking import Expiries, TrackedBlock


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
