"""Times on a device: what it takes itself, the host's time to issue work left out.

Decides how that is measured; also works on a CPU, where the two are one. Called by the parts.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

_HEAD_START_CYCLES = 40_000_000
"""Clock cycles for which the device is kept busy while the host issues what is timed: 20 ms at
2 GHz, longer than an eager pass takes to issue."""


_BEYOND_CACHE_BYTES = 256 * 2**20
"""An H200's L2 holds 60 MB."""


def delay_device(device: torch.device) -> None:
    """Let the host run ahead: what it issues now waits on the device, and then runs in one go."""
    if device.type == "cuda":
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]


def settle(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_seconds(
    run: Callable[[], object], device: torch.device, num_repeats: int = 7, num_inner: int = 1
) -> float:
    """Median seconds of ``run`` on the device, after a run that does not count.

    Args:
        num_inner: runs between two events, for what takes microseconds.
    """
    run()
    settle(device)
    return median(_once(run, device, num_inner) for _ in range(num_repeats)) / num_inner


def _once(run: Callable[[], object], device: torch.device, num_inner: int) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(num_inner):
            run()
        return time.perf_counter() - started
    delay_device(device)
    began, ended = _event(), _event()
    began.record()
    for _ in range(num_inner):
        run()
    ended.record()
    settle(device)
    return float(began.elapsed_time(ended)) / 1000


def cold_seconds(
    runs: Sequence[Callable[[], object]], device: torch.device, num_repeats: int = 7
) -> float:
    """Median seconds of ``runs`` on the device, each with a cache that holds nothing of its own.

    What a pass reads comes from memory: between two of the same operator's calls a layer's weights
    go through the cache. Something larger than that is written before each.
    """
    for run in runs:
        run()
    settle(device)
    return median(_once_cold(runs, device) for _ in range(num_repeats))


def _once_cold(runs: Sequence[Callable[[], object]], device: torch.device) -> float:
    if device.type != "cuda":
        return sum(_once(run, device, 1) for run in runs)
    other = torch.empty(_BEYOND_CACHE_BYTES, dtype=torch.uint8, device=device)
    delay_device(device)
    pairs = []
    for run in runs:
        other.zero_()
        began, ended = _event(), _event()
        began.record()
        run()
        ended.record()
        pairs.append((began, ended))
    settle(device)
    return sum(float(began.elapsed_time(ended)) for began, ended in pairs) / 1000


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def random_matrix(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random numbers: zeros would multiply faster than real ones."""
    return torch.randn(rows, columns, device=device, dtype=dtype)
