"""A worker under virtual time: one iteration at a time, and transfers take time from it."""

from sangam_core.decoding import Decoding
from sangam_core.geometry import Geometry
from sangam_core.placement import Role
from sangam_core.wire import BlockKey
from sangam_loadtest.costs.batch import PassBatch
from sangam_loadtest.simulator.clock import VirtualClock
from sangam_loadtest.simulator.tokens import EOS_ID, MASK_ID, WORD_ID
from sangam_loadtest.simulator.worker import BlockFuture, Iteration, SimulatedWorker
from sangam_worker.block_state import BlockState
from sangam_worker.scheduler import Progress, Scheduler
from sangam_worker.strategies import strategy_named


class Bench:
    """One worker, what it ran and what it reported."""

    def __init__(self, *, tau: int = 1000, total_pages: int = 100) -> None:
        self.clock = VirtualClock()
        self.iterations: list[Iteration] = []
        self.progress: list[Progress] = []
        self.worker = SimulatedWorker(
            0,
            Role.COLOCATED,
            Scheduler(mask_id=MASK_ID, total_pages=total_pages, tau_tokens=tau),
            lambda batch: 1.0 if batch.num_prefills else 0.25,
            self.clock,
            lambda worker, progress, started, ended: self.progress.append(progress),
            self.iterations.append,
        )

    def submit(self, name: str, counts: list[int], *, stop: int = 10**6) -> None:
        self.worker.submit(a_block(name), BlockFuture(counts, stop))

    def run(self) -> None:
        while self.clock.turn():
            pass

    @property
    def spans(self) -> list[tuple[float, float]]:
        return [(item.started_seconds, item.seconds) for item in self.iterations]


def a_block(name: str, *, prompt: int = 32) -> BlockState:
    geometry = Geometry(prompt, 1)
    return BlockState(
        key=BlockKey(request_id=name, block=0),
        arrival_seconds=0.0,
        geometry=geometry,
        decoding=Decoding(eos_ids=(EOS_ID,)),
        strategy=strategy_named("dual"),
        ids=[WORD_ID] * prompt + [MASK_ID] * 32,
        initial_masks=32,
        eos_ids=frozenset({EOS_ID}),
    )


def test_a_block_runs_as_many_passes_as_it_has_counts() -> None:
    bench = Bench()
    bench.submit("a", [8, 8, 16])
    bench.run()
    assert bench.spans == [(0.0, 1.0), (1.0, 0.25), (1.25, 0.25)]
    assert [len(item.commits) for item in bench.progress] == [8, 8, 16]
    assert [item.stage is None for item in bench.progress] == [False, False, True]


def test_masks_are_filled_from_the_left_and_the_answers_last_token_ends_it() -> None:
    bench = Bench()
    bench.submit("a", [8, 8, 16], stop=32 + 13)
    bench.run()
    committed = [(c.position, c.token) for item in bench.progress for c in item.commits]
    assert [position for position, _ in committed] == list(range(32, 48))
    assert [position for position, token in committed if token == EOS_ID] == [44]
    assert bench.progress[-1].completion == "answer"
    assert len(bench.spans) == 2


def test_what_arrives_at_one_moment_is_planned_together() -> None:
    bench = Bench()
    bench.clock.at(1.0, lambda: bench.submit("a", [32]))
    bench.clock.at(1.0, lambda: bench.submit("b", [32]))
    bench.run()
    assert bench.spans == [(1.0, 1.0)]
    assert bench.iterations[0].batch.num_prefills == 2


def test_what_arrives_during_an_iteration_waits_for_its_end() -> None:
    bench = Bench()
    bench.submit("a", [32])
    bench.clock.at(0.5, lambda: bench.submit("b", [32]))
    bench.run()
    assert bench.spans == [(0.0, 1.0), (1.0, 1.0)]
    assert bench.worker.busy_seconds == 2.0


def test_a_transfer_during_an_iteration_makes_the_next_one_longer() -> None:
    bench = Bench()
    bench.submit("a", [16, 8, 8])
    bench.clock.at(0.5, lambda: bench.worker.take_time(2.0))
    bench.run()
    assert bench.spans == [(0.0, 1.0), (1.0, 2.25), (3.25, 0.25)]
    assert bench.worker.busy_seconds == 3.5


def test_a_transfer_takes_idle_time_first() -> None:
    bench = Bench()
    bench.worker.take_time(2.0)
    bench.clock.at(1.5, lambda: bench.submit("a", [32]))
    bench.run()
    assert bench.spans == [(1.5, 1.5)]

    bench = Bench()
    bench.worker.take_time(2.0)
    bench.clock.at(2.0, lambda: bench.submit("a", [32]))
    bench.run()
    assert bench.spans == [(2.0, 1.0)]


def test_two_transfers_take_the_time_of_both() -> None:
    bench = Bench()
    bench.worker.take_time(2.0)
    bench.clock.at(1.0, lambda: bench.worker.take_time(2.0))
    bench.clock.at(1.5, lambda: bench.submit("a", [32]))
    bench.run()
    assert bench.spans == [(1.5, 3.5)]


def test_time_that_a_transfer_took_passes_while_nothing_runs() -> None:
    def started(at: float) -> tuple[float, float]:
        bench = Bench()
        bench.submit("a", [32])
        bench.clock.at(0.5, lambda: bench.worker.take_time(2.0))
        bench.clock.at(at, lambda: bench.submit("b", [32]))
        bench.run()
        return bench.spans[1]

    assert started(2.5) == (2.5, 1.5)
    assert started(5.0) == (5.0, 1.0)


def test_a_blocking_transfer_waits_for_the_pass_and_goes_before_the_next() -> None:
    bench, ended = Bench(), []
    bench.submit("a", [32])
    bench.clock.at(0.5, lambda: bench.submit("b", [32]))
    bench.clock.at(0.5, lambda: bench.worker.block(2.0, lambda: ended.append(bench.clock.now)))
    bench.clock.at(0.75, lambda: bench.worker.block(1.0, lambda: ended.append(bench.clock.now)))
    bench.run()
    assert ended == [3.0, 4.0]
    assert bench.spans == [(0.0, 1.0), (4.0, 1.0)]
    assert bench.worker.busy_seconds == 5.0


def test_a_blocking_transfer_of_an_idle_worker_begins_at_once() -> None:
    bench, ended = Bench(), []
    bench.clock.at(1.0, lambda: bench.worker.block(2.0, lambda: ended.append(bench.clock.now)))
    bench.clock.at(1.5, lambda: bench.submit("a", [32]))
    bench.run()
    assert ended == [3.0]
    assert bench.spans == [(3.0, 1.0)]


def test_an_iterations_batch_is_its_rows_keys_and_pairs() -> None:
    bench = Bench()
    bench.submit("a", [20, 12])
    bench.clock.at(0.5, lambda: bench.worker.submit(a_block("b", prompt=68), BlockFuture([32], 0)))
    bench.run()
    assert bench.iterations[0].batch == PassBatch(
        num_prefills=1, prefill_rows=64, prefill_square_rows=64 * 64, head_rows=32
    )
    assert bench.iterations[1].batch == PassBatch(
        num_decodes=1,
        decode_rows=32,
        decode_keys=64,
        decode_row_keys=32 * 64,
        num_prefills=1,
        prefill_rows=100,
        prefill_square_rows=100 * 100,
        head_rows=12 + 32,
    )
