"""What the card can do: bandwidth of a copy, FLOP/s of large products. Measured first: every
floor (``roofline``) is made from it. Called by the command.
"""

from collections.abc import Callable

import torch

from benchmarks.gpu.parts import Record
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.timing import device_seconds, random_matrix
from sangam_loadtest.costs.gpus import Gpu


def measure_ceilings(record: Record, device: torch.device, sizes: Sizes) -> None:
    """Fill in ``copy_bytes_per_second`` (read plus written), ``bf16_flops`` and ``fp8_flops``."""
    record["copy_bytes_per_second"] = 2 * sizes.copy_bytes / _copy_seconds(device, sizes)
    side = sizes.product_side
    a, b = (random_matrix(side, side, device, torch.bfloat16) for _ in range(2))
    flops = 2 * side**3
    record["bf16_flops"] = flops / device_seconds(lambda: a @ b, device)
    record["fp8_flops"] = flops / device_seconds(fp8_product(a, b.t().contiguous()), device)
    record["memory_bytes"] = _memory_bytes(device)


def _copy_seconds(device: torch.device, sizes: Sizes) -> float:
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device).random_(255)
    target = torch.empty_like(source)
    return device_seconds(lambda: target.copy_(source), device)


def fp8_product(a: torch.Tensor, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    """``a @ weight.T`` in e4m3 with a scale a row of each (``[m, k]`` and ``[n, k]``)."""
    left, right = (each.to(torch.float8_e4m3fn) for each in (a, weight))
    scale_left = torch.ones(len(left), 1, device=a.device)
    scale_right = torch.ones(1, len(right), device=a.device)
    return lambda: torch._scaled_mm(
        left, right.t(), scale_left, scale_right, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def gpu_of(record: Record) -> Gpu:
    """The ceilings as the cost model has them.

    Raises:
        KeyError: they were not measured.
    """
    return Gpu(
        bf16_flops=record["bf16_flops"],
        fp8_flops=record["fp8_flops"],
        bytes_per_second=record["copy_bytes_per_second"],
        memory_bytes=record["memory_bytes"],
    )


def _memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return 1e9
