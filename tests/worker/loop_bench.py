"""A GPU thread with what surrounds it: what it publishes, its clock, blocks to give it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.worker.fakes import ToyEngine, ToyPool
from tests.worker.harness import DEADLINE_SECONDS, a_sequence

from sangam_core.decoding import Decoding, Resume
from sangam_core.wire import BlockEvent, BlockKey, BlockStart, LossReason, WireGeometry
from sangam_worker.block_state import BlockState, block_state_from
from sangam_worker.loop import EngineLoop
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.plan import Outcome, Plan
from sangam_worker.reporting import Notice
from sangam_worker.scheduler import Scheduler

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


def full_pool(bench: Bench) -> None:
    """Fill the pool, with an iteration under way, and give one block's pages back meanwhile.

    The engine's gate is left closed.
    """
    held = [a_transferred_state(f"held {number}") for number in range(15)]
    for state in held:
        assert bench.loop.reserve(state, 600.0).result(0)
    bench.engine.gate.clear()
    bench.submit(a_state("running"))
    assert bench.engine.has_begun(1)
    bench.loop.transfer_ended(held[0].key, CANCELLED)


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
