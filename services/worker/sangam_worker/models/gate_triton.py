"""SiLU-mul on CUDA: a short Triton kernel in place of FlashInfer's.

FlashInfer's (0.6.18, ``act_and_mul_kernel``) has one thread block a row, and computes what is left
behind its last whole round of 1,024 threads a second time, entry by entry: a third of LLaDA-8B's
rows of 12,288 and a seventh of Dream-7B's of 18,944. Here a row is cut into parts that are loaded
once, 16 bytes a thread, so that a decode's few rows use the whole device. Imported by
``flashinfer_operators`` for CUDA devices only: nothing else needs Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PART_ENTRIES = 1024
NUM_WARPS = 4
"""8 entries a thread: one load of 16 bytes of either half in bf16."""


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of each row times its second half, rounded once.

    Args:
        gate_up: ``[rows, 2 * width]``, contiguous.

    Returns:
        ``[rows, width]``.
    """
    num_rows, both = gate_up.shape
    width = both // 2
    assert gate_up.is_contiguous()
    result = gate_up.new_empty((num_rows, width))
    grid = num_rows, triton.cdiv(width, PART_ENTRIES)
    with torch.cuda.device(gate_up.get_device()):  # Triton launches on the current one
        silu_mul_part[grid](
            result, gate_up, width=width, part_entries=PART_ENTRIES, num_warps=NUM_WARPS
        )
    return result


@triton.jit  # type: ignore[untyped-decorator]
def silu_mul_part(
    result: tl.tensor,
    gate_up: tl.tensor,
    width: tl.constexpr,
    part_entries: tl.constexpr,
) -> None:
    """A part of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * part_entries + tl.arange(0, part_entries)
    halves = gate_up + row * (2 * width) + at
    gate = tl.load(halves, at < width, 0.0).to(tl.float32)
    up = tl.load(halves + width, at < width, 0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(result + row * width + at, gated.to(result.dtype.element_ty), at < width)
