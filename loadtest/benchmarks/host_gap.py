"""What the host takes for an iteration: stage by stage, and as the gap that a device waits.

Everything is real but the model (``host_stub``): scheduler, books, index arrays, sampler, rules,
events. Stages are timed one after the other; the gap is the loop's own, with a device that takes
its time and an event loop that writes the events of blocks and replaces those that end. What the
attention backend plans and what launching a graph takes is not in it: that needs a GPU. Run by
``make bench-host-gap``.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from rich.console import Console
from rich.table import Table

from benchmarks.host_stub import Case, EventLoop, Host, StubDevice
from sangam_core.wire import BlockKey, Completed
from sangam_worker.books import Books
from sangam_worker.interpreter import favour_gpu_thread
from sangam_worker.loop import EngineLoop
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.packing import pack
from sangam_worker.plan import Outcome
from sangam_worker.reporting import Notice, Reporter
from sangam_worker.streams import line_of
from sangam_worker.tracking import Moved, TrackedBlock

GAP_STAGES = ("rules", "apply", "next_plan", "arrays")
"""What the device waits for, in order."""
BESIDE_STAGES = ("propose", "report", "publish")
"""What the host does while the device works."""
PACK = "pack"
"""What an iteration without a graph has for ``arrays``."""
_TIMED = ("next_plan", PACK, "arrays", "propose", "rules", "apply", "report", "publish")
"""In the order of their being timed."""
_DEADLINE_SECONDS = 600.0


def stage_microseconds(
    num_blocks: int, num_iterations: int, case: Case = Case.LOCKSTEP
) -> dict[str, float]:
    """Medians by stage, of the thread's CPU time: what else runs here disturbs that less."""
    host, metrics, clock = Host.build(num_blocks, case), WorkerMetrics(), time.thread_time
    books = Books(host.scheduler, clock)
    batches: list[Sequence[Notice]] = []
    reporter = Reporter(batches.append, metrics)
    seconds: dict[str, list[float]] = {name: [] for name in _TIMED}

    with EventLoop() as aio:
        for _ in range(num_iterations):
            for _ in range(num_blocks - books.status().num_blocks):
                _come(host, books)
            times = [clock()]
            plan = host.scheduler.next_plan()
            assert plan is not None
            times.append(clock())
            pack(plan.passes, host.config.family)
            times.append(clock())
            host.write(plan)
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
    return {name: 1e6 * median(values) for name, values in seconds.items()}


def _come(host: Host, books: Books) -> None:
    state = host.blocks.next()
    if state.step == 0:
        books.submit(TrackedBlock(state, 0.0, _DEADLINE_SECONDS, is_transferred=False))
    else:
        assert books.reserve(TrackedBlock(state, 0.0, _DEADLINE_SECONDS, is_transferred=True))
        books.transfer_ended(state.key, Moved(0.0, 0), 0.0)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Of which iterations the blocks could have been known before the outcome of the one before.

    Attributes:
        same: share with the same blocks: nothing but their tokens is made anew for these. more:
            share with these and others: what a plan that is made ahead would be right for.
    """

    same: float
    more: float


def foreseen(num_blocks: int, num_iterations: int, case: Case = Case.LOCKSTEP) -> Foreseen:
    """Count iterations in which no block of the one before is missing."""
    host = Host.build(num_blocks, case)
    books = Books(host.scheduler, time.monotonic)
    before: set[BlockKey] = set()
    num_same = num_more = 0
    for _ in range(num_iterations):
        for _ in range(num_blocks - books.status().num_blocks):
            _come(host, books)
        plan = host.scheduler.next_plan()
        assert plan is not None
        now = {item.key for item in plan.passes}
        num_same += now == before
        num_more += bool(before) and now > before
        before = now
        books.take_in(Outcome(plan.iteration, host.proposals(plan).outcomes()), 0.0, 0.0)
    return Foreseen(num_same / num_iterations, num_more / num_iterations)


@dataclass(frozen=True, slots=True)
class Gap:
    """How long a device waits between two iterations, microseconds.

    Attributes:
        busy: CPU time of the thread, median. median, p99: by the clock.
    """

    busy: float
    median: float
    p99: float


def gap_microseconds(
    num_blocks: int,
    num_iterations: int,
    device_seconds: float,
    case: Case = Case.LOCKSTEP,
    *,
    is_spun: bool = False,
) -> Gap:
    """The gaps of a whole loop."""
    host = Host.build(num_blocks, case)
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
            if state.step == 0:
                loop.submit(state, _DEADLINE_SECONDS)
                return
            reserved = loop.reserve(state, _DEADLINE_SECONDS)
            reserved.add_done_callback(lambda _: loop.transfer_ended(state.key, Moved(0.0, 0)))

        loop = EngineLoop(device, host.scheduler, publish, WorkerMetrics())
        for _ in range(num_blocks):
            come()
        loop.start()
        assert device.is_done.wait(_DEADLINE_SECONDS)
        assert loop.stop(_DEADLINE_SECONDS)
    gaps, busy = device.gaps[:num_iterations], device.busy[:num_iterations]
    return Gap(1e6 * median(busy), 1e6 * median(gaps), 1e6 * quantiles(gaps, n=100)[98])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--device-ms", type=float, default=8.0)
    parser.add_argument("--spin", action="store_true", help="wait for the device as CUDA does")
    parser.add_argument(
        "--case",
        type=Case,
        nargs="+",
        choices=list(Case),
        default=list(Case),
        help="lockstep: blocks that began together, the best case; decode: transferred blocks of "
        "mixed lengths come and go; colocated: so do blocks that are prefilled here",
    )
    parsed = parser.parse_args(arguments)
    favour_gpu_thread()
    for case in parsed.case:
        _measure(parsed, case)


def _measure(parsed: argparse.Namespace, case: Case) -> None:
    blocks, iterations = parsed.blocks, parsed.iterations
    device_seconds = parsed.device_ms / 1000
    stages, gaps, shares = [], [], []
    for each in blocks:
        sys.stderr.write(f"measuring {case} with {each} blocks\n")
        sys.stderr.flush()
        stages.append(stage_microseconds(each, iterations, case))
        gap = gap_microseconds(each, iterations, device_seconds, case, is_spun=parsed.spin)
        gaps.append(gap)
        shares.append(foreseen(each, iterations, case))
    heads = (f"{each} blocks" for each in blocks)
    table = Table("microseconds", *heads, title=f"{case}", title_justify="left")

    def add(name: str, value: Callable[[int], float]) -> None:
        table.add_row(name, *(f"{value(index):.0f}" for index in range(len(blocks))))

    for name in GAP_STAGES:
        add(name, lambda index, name=name: stages[index][name])  # type: ignore[misc]
    table.add_section()
    add("sum of these", lambda index: sum(stages[index][name] for name in GAP_STAGES))
    add("gap in the loop, CPU time", lambda index: gaps[index].busy)
    add("gap in the loop, median", lambda index: gaps[index].median)
    add("gap in the loop, P99", lambda index: gaps[index].p99)
    table.add_section()
    add("% of iterations: the same blocks", lambda index: 100 * shares[index].same)
    add("% of iterations: these and others", lambda index: 100 * shares[index].more)
    table.add_section()
    add("without a graph: pack for arrays", lambda index: stages[index][PACK])
    for name in BESIDE_STAGES:
        add(f"beside the device: {name}", lambda index, name=name: stages[index][name])  # type: ignore[misc]
    Console().print(table)


if __name__ == "__main__":
    main()
