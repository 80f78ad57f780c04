"""What the card can do: bandwidth of a copy, FLOP/s of large products. Measured first: every
floor (``roofline``) is made from it. Decides what stands for one that could not be measured: an
H200's, which a table then says. Called by the command.
"""

from collections.abc import Callable

import torch

from benchmarks.gpu.parts import Record, say
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.timing import device_seconds, random_matrix
from sangam_loadtest.costs.gpus import Gpu
from sangam_loadtest.costs.table import read_table

_COPY, _BF16, _FP8, _MEMORY = "copy_bytes_per_second", "bf16_flops", "fp8_flops", "memory_bytes"
_NUM_PRODUCTS = 10
"""One after the other: a card that has just rested computes a little faster than it can go on."""


def measure_ceilings(record: Record, device: torch.device, sizes: Sizes) -> None:
    """Fill in ``copy_bytes_per_second`` (read plus written), ``bf16_flops`` and ``fp8_flops``.

    Each is measured whatever became of the others; ``errors`` has those that could not be.
    """
    record[_MEMORY] = _memory_bytes(device)
    measures: dict[str, Callable[[], float]] = {
        _COPY: lambda: 2 * sizes.copy_bytes / _copy_seconds(device, sizes),
        _BF16: lambda: _product_flops(device, sizes, is_fp8=False),
        _FP8: lambda: _product_flops(device, sizes, is_fp8=True),
    }
    for name, measure in measures.items():
        try:
            record[name] = measure()
        except RuntimeError as error:
            # FP8 in rows' scales is not for every device and version of torch.
            record.setdefault("errors", {})[name] = str(error)[:300]
        say(f"         {name}: {record.get(name, 'an H200 has it by its table')}")


def _product_flops(device: torch.device, sizes: Sizes, *, is_fp8: bool) -> float:
    side = sizes.product_side
    a, b = (random_matrix(side, side, device, torch.bfloat16) for _ in range(2))
    run: Callable[[], torch.Tensor] = fp8_product(a, b) if is_fp8 else lambda: a @ b
    return 2 * side**3 / device_seconds(run, device, num_inner=_NUM_PRODUCTS)


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


def gpu_of(found: Record) -> Gpu:
    """The ceilings as the cost model has them; an H200's where they were not measured."""
    assumed = read_table().gpus["h200"]
    return Gpu(
        bf16_flops=found.get(_BF16, assumed.bf16_flops),
        fp8_flops=found.get(_FP8, assumed.fp8_flops),
        bytes_per_second=found.get(_COPY, assumed.bytes_per_second),
        memory_bytes=found.get(_MEMORY, assumed.memory_bytes),
    )


def assumed_ceilings(found: Record) -> list[str]:
    """Those that were not measured."""
    return [name for name in (_COPY, _BF16, _FP8) if name not in found]


def _memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return 1e9
