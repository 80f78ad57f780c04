"""Captures what was issued to the device once, to be issued again in one call.

A seam: tests put something in its place that runs the same code again. Called by ``runner``.
"""

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Protocol

import torch

Replay = Callable[[], None]
"""Issues what was captured again, on the current stream: the same work on the same memory."""

_REPLAYS = 3
"""That are timed: one may be disturbed."""

_LONG_SECONDS = 0.005
"""Of a replay that is timed once: what disturbs is short beside it, and there are hundreds."""


class Capture(Protocol):
    """Makes replays."""

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Take what ``run`` issues. It may run more than once meanwhile, or not at all."""
        ...

    def seconds(self, replay: Replay) -> float:
        """What a replay takes the device, in seconds."""
        ...

    @property
    def taken_bytes(self) -> int:
        """Memory of the device that is gone since this was made, for whatever reason."""
        ...


class CudaCapture:
    """CUDA graphs that share one pool of memory.

    Whatever is captured may use the memory of what was captured before, so that results are valid
    until the next replay of any, and the largest is to be captured first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._free_bytes = self._measure_free_bytes()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Run it once, so that kernels are loaded and libraries have their memory; then capture."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads' calls (a probe of the driver, say) do not matter to the capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        # What is tried is captured and dropped; but of a pool that no graph has any more, with a
        # tensor left in it, torch says "use_count > 0 INTERNAL ASSERT FAILED" at the next capture.
        self._first = self._first or graph
        return graph.replay

    def seconds(self, replay: Replay) -> float:
        """See ``Capture``: the median of some; of what takes long, one says enough."""
        (first,) = self._timed(replay, 1)  # with what a graph does once
        return median(self._timed(replay, 1 if first > _LONG_SECONDS else _REPLAYS))

    def _timed(self, replay: Replay, number: int) -> list[float]:
        """Seconds of replays right behind each other."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]  # type: ignore[no-untyped-call]
        for event in events[:-1]:
            event.record()
            replay()
        events[-1].record()
        events[-1].synchronize()
        return [began.elapsed_time(ended) / 1000 for began, ended in pairwise(events)]

    @property
    def taken_bytes(self) -> int:
        """See ``Capture``."""
        return self._free_bytes - self._measure_free_bytes()

    def _measure_free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return int(free_bytes)
