"""What the host takes for an iteration: stage by stage, and as the gap that a device waits.

Everything is real but the model: scheduler, books, the graphs' index arrays, sampler, rules,
events. In the logits' place a kernel makes up a candidate a row, a tenth of them confident. Stages
are timed one after the other; the gap is the loop's own, with a device that takes its time and an
event loop that writes the events of blocks and replaces those that end. What the attention backend
plans and what launching a graph takes is not in it: that needs a GPU. Run by
``make bench-host-gap``.
"""

import argparse
import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from statistics import median, quantiles

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sangam_core.decoding import Decoding, EosRule, Resume
from sangam_core.geometry import DEFAULT_BLOCK_LENGTH, PAGE_TOKENS, Geometry
from sangam_core.wire import BlockKey, BlockStart, Completed, KVSource, WireGeometry
from sangam_worker.block_state import BlockState, block_state_from
from sangam_worker.books import Books
from sangam_worker.graphs.static_batch import LayoutKey, StaticBatch, layout_key
from sangam_worker.interpreter import favour_gpu_thread
from sangam_worker.loop import EngineLoop
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.random_models import random_config
from sangam_worker.packing import pack, rows_that_predict
from sangam_worker.plan import Outcome, Pass, Plan
from sangam_worker.reporting import Notice, Reporter
from sangam_worker.sampling.sampler import Proposals, Sampler
from sangam_worker.scheduler import Scheduler
from sangam_worker.streams import line_of
from sangam_worker.tracking import Moved, TrackedBlock

MODEL = "random:llada-8b"
CONTEXT_TOKENS = 1024
GAP_STAGES = ("rules", "apply", "next_plan", "arrays")
"""What the device waits for, in order."""
BESIDE_STAGES = ("propose", "report", "publish")
"""What the host does while the device works."""
PACK = "pack"
"""What iterations without a graph have in place of ``arrays``."""
_TIMED = ("next_plan", PACK, "arrays", "propose", "rules", "apply", "report", "publish")
"""In the order of their being timed."""
_CONFIDENT_SHARE = 0.1
_LOCK_FREE = bytes(2**14)
"""Hashing as much lets go of the interpreter, for some 10 us."""
_DEADLINE_SECONDS = 600.0
_ELSEWHERE = KVSource(worker_id="elsewhere", epoch="none", url="http://elsewhere")


class MadeUp:
    """Candidates without logits: every call goes on in a long list of figures."""

    def __init__(self, vocab_size: int, num_rows: int = 100_003) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocab_size - 1, (num_rows,), generator=generator)
        confidences = torch.rand(num_rows, generator=generator).double()
        confidences = confidences * 0.9 / (1 - _CONFIDENT_SHARE)  # so many are above 0.9
        self._figures = torch.stack((tokens.double(), confidences.clamp(max=1.0)), 1)
        self._at = 0

    def __call__(self, logits: Tensor, mask_id: int, num_columns: int) -> Tensor:
        """The next rows."""
        if self._at + len(logits) > len(self._figures):
            self._at = 0
        self._at += len(logits)
        return self._figures[self._at - len(logits) : self._at]


class Blocks:
    """Makes blocks that have been prefilled elsewhere: all that runs are decodes."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._numbers = count()
        random, num_masks = Random(0), DEFAULT_BLOCK_LENGTH
        prompt = [random.randrange(1000) for _ in range(CONTEXT_TOKENS - num_masks)]
        self._ids = (*prompt, *[config.mask_id] * num_masks)
        self.num_pages = CONTEXT_TOKENS // PAGE_TOKENS

    def next(self) -> BlockState:
        """One more."""
        config, number, length = self._config, next(self._numbers), DEFAULT_BLOCK_LENGTH
        start = BlockStart(
            key=BlockKey(request_id=f"request-{number:08}", block=0),
            worker_epoch="in-process",
            arrival_seconds=float(number),
            ids=self._ids,
            geometry=WireGeometry.of(Geometry(CONTEXT_TOKENS - length, 1, length)),
            decoding=Decoding(eos_ids=config.eos_ids, eos_rule=EosRule.IGNORE),
            source=_ELSEWHERE,
            resume=Resume(step=1, initial_masks=length),
        )
        return block_state_from(start, config.mask_id, config.vocab_size)


class Arrays:
    """A graph's arrays, written as ``graphs.runner`` does."""

    def __init__(self, num_blocks: int, total_pages: int) -> None:
        device = torch.device("cpu")
        self._batch = StaticBatch(
            num_blocks, DEFAULT_BLOCK_LENGTH, total_pages + 1, total_pages, device
        )
        self._planned: LayoutKey | None = None

    def write(self, passes: Sequence[Pass]) -> None:
        """Write what an iteration changes, and copy it."""
        key = layout_key(passes)
        self._batch.feed(passes)
        self._batch.send(None if key == self._planned else self._batch.lay_out(passes))
        self._planned = key


@dataclass(frozen=True, slots=True)
class Host:
    """The parts that both measurements are made of."""

    config: ModelConfig
    blocks: Blocks
    sampler: Sampler
    scheduler: Scheduler
    arrays: Arrays
    logits: Tensor

    @classmethod
    def build(cls, num_blocks: int) -> "Host":
        """For iterations of so many decodes."""
        config = random_config(MODEL)
        blocks = Blocks(config)
        pages = (num_blocks + 1) * blocks.num_pages
        return cls(
            config,
            blocks,
            Sampler(config, torch.bfloat16, MadeUp(config.vocab_size)),
            Scheduler(mask_id=config.mask_id, total_pages=pages, tau_tokens=2**20),
            Arrays(num_blocks, pages),
            torch.empty((num_blocks * DEFAULT_BLOCK_LENGTH, 1)),
        )

    def proposals(self, plan: Plan) -> Proposals:
        """What the sampler asks the device for; the device answers at once."""
        at = rows_that_predict(plan.passes, self.config.family)
        return self.sampler.launch(self.logits, plan.passes, at)


def stage_microseconds(num_blocks: int, num_iterations: int) -> dict[str, float]:
    """Medians by stage, of the thread's CPU time: what else runs here disturbs that less."""
    host, metrics, clock = Host.build(num_blocks), WorkerMetrics(), time.thread_time
    books = Books(host.scheduler, clock)
    batches: list[Sequence[Notice]] = []
    reporter = Reporter(batches.append, metrics)
    seconds: dict[str, list[float]] = {name: [] for name in _TIMED}

    def come() -> None:
        state = host.blocks.next()
        now = clock()
        assert books.reserve(TrackedBlock(state, now, now + 1e6, is_transferred=True))
        books.transfer_ended(state.key, Moved(0.0, 0), now)

    with EventLoop() as aio:
        for _ in range(num_blocks):
            come()
        for _ in range(num_iterations):
            times = [clock()]
            plan = host.scheduler.next_plan()
            assert plan is not None
            times.append(clock())
            pack(plan.passes, host.config.family)
            times.append(clock())
            host.arrays.write(plan.passes)
            times.append(clock())
            proposals = host.proposals(plan)
            times.append(clock())
            outcome = Outcome(plan.iteration, proposals.outcomes())
            times.append(clock())
            books.take_in(outcome, times[0], times[-1])
            times.append(clock())
            reporter.tell(books.take_happened())
            times.append(clock())
            aio.call_soon_threadsafe(list, batches.pop())
            times.append(clock())
            for name, before, after in zip(_TIMED, times, times[1:], strict=False):
                seconds[name].append(after - before)
            for _ in range(num_blocks - host.scheduler.num_running):
                come()
    return {name: 1e6 * median(values) for name, values in seconds.items()}


class StubDevice:
    """An engine whose device takes a fixed time for everything.

    Args:
        is_spun: wait for it as CUDA does, on a core of one's own, which then is as warm as there;
            otherwise asleep.

    Attributes:
        gaps: seconds that the device stood still before each iteration.
    """

    def __init__(
        self, host: Host, device_seconds: float, num_iterations: int, *, is_spun: bool
    ) -> None:
        self._host = host
        self._is_spun = is_spun
        self._device_seconds = device_seconds
        self._num_iterations = num_iterations
        self._ended: float | None = None
        self.gaps: list[float] = []
        self.is_done = threading.Event()

    def launch(self, plan: Plan) -> "StubLaunch":
        """Write the arrays; the device begins. Then ask for candidates behind the pass."""
        self._host.arrays.write(plan.passes)
        now = time.perf_counter()
        if self._ended is not None:
            self.gaps.append(now - self._ended)
        if len(self.gaps) == self._num_iterations:
            self.is_done.set()
        until = now + self._device_seconds
        return StubLaunch(self, plan, self._host.proposals(plan), until)

    def wait(self, until: float) -> None:
        """Until the device has nothing to do any more; the interpreter is free meanwhile."""
        if self._is_spun:
            while time.perf_counter() < until:
                hashlib.sha256(_LOCK_FREE)
        else:
            time.sleep(max(0.0, until - time.perf_counter()))
        self._ended = time.perf_counter()


@dataclass(frozen=True, slots=True)
class StubLaunch:
    """An iteration that the device takes its time over."""

    device: StubDevice
    plan: Plan
    proposals: Proposals
    until: float
    device_seconds: None = None

    def outcome(self) -> Outcome:
        """Wait, then apply the rules."""
        self.device.wait(self.until)
        return Outcome(self.plan.iteration, self.proposals.outcomes())


def gap_microseconds(
    num_blocks: int, num_iterations: int, device_seconds: float, *, is_spun: bool = False
) -> tuple[float, float]:
    """Median and 99th percentile of the gaps of a whole loop."""
    host = Host.build(num_blocks)
    device = StubDevice(host, device_seconds, num_iterations, is_spun=is_spun)
    with EventLoop() as aio:

        def deliver(batch: Sequence[Notice]) -> None:
            for _, event in batch:
                line_of(event)
                if isinstance(event, Completed):
                    come()

        def publish(batch: Sequence[Notice]) -> None:
            aio.call_soon_threadsafe(deliver, batch)

        def come() -> None:
            state = host.blocks.next()
            reserved = loop.reserve(state, _DEADLINE_SECONDS)
            reserved.add_done_callback(lambda _: loop.transfer_ended(state.key, Moved(0.0, 0)))

        loop = EngineLoop(device, host.scheduler, publish, WorkerMetrics())
        for _ in range(num_blocks):
            come()
        loop.start()
        assert device.is_done.wait(_DEADLINE_SECONDS)
        assert loop.stop(_DEADLINE_SECONDS)
    gaps = device.gaps[:num_iterations]
    return 1e6 * median(gaps), 1e6 * quantiles(gaps, n=100)[98]


class EventLoop:
    """An event loop on a thread of its own, as a worker has it."""

    def __enter__(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self._loop

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--device-ms", type=float, default=8.0)
    parser.add_argument("--spin", action="store_true", help="wait for the device as CUDA does")
    parsed = parser.parse_args(arguments)
    favour_gpu_thread()
    table = Table("microseconds", *(f"{blocks} blocks" for blocks in parsed.blocks))
    stages = [stage_microseconds(blocks, parsed.iterations) for blocks in parsed.blocks]
    gaps = [
        gap_microseconds(blocks, parsed.iterations, parsed.device_ms / 1000, is_spun=parsed.spin)
        for blocks in parsed.blocks
    ]

    def add(name: str, value: Callable[[int], float]) -> None:
        table.add_row(name, *(f"{value(index):.0f}" for index in range(len(parsed.blocks))))

    for name in GAP_STAGES:
        add(name, lambda index, name=name: stages[index][name])  # type: ignore[misc]
    table.add_section()
    add("sum of these", lambda index: sum(stages[index][name] for name in GAP_STAGES))
    add("gap in the loop, median", lambda index: gaps[index][0])
    add("gap in the loop, P99", lambda index: gaps[index][1])
    table.add_section()
    add("without a graph: pack for arrays", lambda index: stages[index][PACK])
    for name in BESIDE_STAGES:
        add(f"beside the device: {name}", lambda index, name=name: stages[index][name])  # type: ignore[misc]
    Console().print(table)


if __name__ == "__main__":
    main()
