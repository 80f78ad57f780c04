"""KV transfers on one device: pages a second, alone and beside a pass, by NCCL's CTAs.

Decides what is moved (the pages of one request, onto other pages of the pool) and how long. On a
GPU a communicator of one rank sends to itself, which is all that NCCL allows on one; on a CPU pages
are gathered and scattered, so that this runs there too. Called by the parts.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.gpu.one_pass import plan_of, time_pass
from benchmarks.gpu.parts import Budget, Record, say
from benchmarks.gpu.passes import Timed
from benchmarks.gpu.timing import settle
from benchmarks.iterations import BLOCK_LENGTH, Iteration
from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.kv_pool import KVPool

_TIMEOUT_SECONDS = 30.0
_NUM_REPEATS = 5

Copy = Callable[[Sequence[int], Sequence[int]], int]
"""Copies pages of every layer onto as many others, and returns bytes; they are there then."""


def time_transport(
    record: Record, budget: Budget, timed: Timed, num_tokens: int, max_ctas: Sequence[int]
) -> None:
    """A line for each number of CTAs: milliseconds, pages/s and GB/s of one request's KV, and the
    prefill of as many tokens without and beside such transfers."""
    lines: list[dict[str, Any]] = record.setdefault("lines", [])
    pool = timed.engine.kv_pool
    num_pages = num_tokens // PAGE_TOKENS
    # The pass is on the first third of the pool, so that no transfer touches its pages.
    sources = range(num_pages, 2 * num_pages)
    targets = range(2 * num_pages, 3 * num_pages)
    iteration = Iteration(num_tokens, 0, num_tokens, BLOCK_LENGTH)
    plan = plan_of(iteration, timed.engine.model_config, num_pages)

    def pass_ms() -> float:
        return time_pass(timed.engine, plan, 9).wall

    for ctas in max_ctas:
        if budget.left_seconds <= 0:
            record["cut_short"] = [f"{each} CTAs" for each in max_ctas if each >= ctas]
            return
        with _copier(pool, ctas) as copy:
            seconds = _seconds(copy, sources, targets, pool)
            alone = pass_ms()
            with _copying(copy, sources, targets) as beside:
                disturbed = pass_ms()
            cost = (disturbed - alone) * beside.seconds_each / (disturbed / 1000)
        line = {
            "max_ctas": ctas,
            "pages": num_pages,
            "transfer_ms": 1000 * seconds,
            "pages_per_second": num_pages / seconds,
            "gigabytes_per_second": num_pages * pool.bytes_per_page / seconds / 1e9,
            "pass_alone_ms": alone,
            "pass_beside_ms": disturbed,
            "cost_of_a_transfer_ms": cost,
        }
        lines.append(line)
        say(f"         {line}")


def _seconds(copy: Copy, sources: Sequence[int], targets: Sequence[int], pool: KVPool) -> float:
    copy(sources, targets)
    settle(pool.device)
    times = []
    for _ in range(_NUM_REPEATS):
        started = time.perf_counter()
        copy(sources, targets)
        times.append(time.perf_counter() - started)
    return median(times)


class _Beside:
    """Copies in a thread of its own, again and again."""

    def __init__(self, copy: Copy, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._copy, self._pages = copy, (sources, targets)
        self._is_over = threading.Event()
        self._num, self._seconds = 0, 0.0
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="transfers", daemon=True)

    @property
    def seconds_each(self) -> float:
        """Of one transfer, so far."""
        return self._seconds / max(1, self._num)

    def stop(self) -> None:
        """End with the transfer under way; raises what went wrong."""
        self._is_over.set()
        self.thread.join(_TIMEOUT_SECONDS)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                started = time.perf_counter()
                self._copy(*self._pages)
                self._num, self._seconds = (
                    self._num + 1,
                    self._seconds + time.perf_counter() - started,
                )
        except Exception as error:  # noqa: BLE001 - told where it is joined
            self.error = error


@contextmanager
def _copying(copy: Copy, sources: Sequence[int], targets: Sequence[int]) -> Iterator[_Beside]:
    beside = _Beside(copy, sources, targets)
    beside.thread.start()
    try:
        yield beside
    finally:
        beside.stop()


@contextmanager
def _copier(pool: KVPool, max_ctas: int) -> Iterator[Copy]:
    if pool.device.type != "cuda":
        yield lambda sources, targets: _gathered(pool, sources, targets)
        return
    from benchmarks.gpu.nccl_loop import NcclLoop
    from sangam_worker.transfer.cuda_streams import CudaStreams
    from sangam_worker.transfer.nccl_library import load_nccl

    library = load_nccl(pool.device)
    with NcclLoop(pool, library, CudaStreams(pool.device), max_ctas=max_ctas) as loop:
        yield lambda sources, targets: loop.copy(sources, targets, _TIMEOUT_SECONDS)


def _gathered(pool: KVPool, sources: Sequence[int], targets: Sequence[int]) -> int:
    for layer in range(pool.num_layers):
        pool.scatter(layer, targets, pool.gather(layer, sources))
    return len(sources) * pool.bytes_per_page
