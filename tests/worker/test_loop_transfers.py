"""The GPU thread and transfers: pins, reservations, blocks that arrive, how long they waited."""

from tests.worker.harness import DEADLINE_SECONDS
from tests.worker.loop_bench import (
    CANCELLED,
    TOTAL_PAGES,
    Bench,
    Clock,
    TickingEngine,
    a_bench,
    a_state,
    a_transferred_state,
    full_pool,
)

from sangam_core.wire import (
    BlockKey,
    Completed,
    KVArrived,
    KVSent,
    LossReason,
    Lost,
    PassRan,
    Prefilled,
)
from sangam_worker.tracking import Moved


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
        full_pool(bench)
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
