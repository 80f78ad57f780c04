"""Times on a device: what it takes itself, the host's time to issue work left out.

Decides how that is measured; also works on a CPU, where the two are one. Called by the parts.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

_HEAD_START_CYCLES = 40_000_000
"""Clock cycles for which the device is kept busy while the host issues what is timed: 20 ms at
2 GHz, longer than an eager pass takes to issue."""


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
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    events[0].record()
    for _ in range(num_inner):
        run()
    events[1].record()
    settle(device)
    return float(events[0].elapsed_time(events[1])) / 1000


def random_matrix(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random numbers: zeros would multiply faster than real ones."""
    return torch.randn(rows, columns, device=device, dtype=dtype)
