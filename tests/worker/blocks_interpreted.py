"""The kernel of block attention where Triton interprets: what the other process runs.

The interpreter cuts bfloat16 off where the GPU rounds, and multiplies its bits as if they were
numbers: torch's rounding, and products of the same numbers in float32, stand in for them.
"""

from typing import Any

import numpy as np
import tests.worker.fp8_interpreted  # noqa: F401 - puts torch's rounding in
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from sangam_worker.attention.blocks import Tiling
from sangam_worker.attention.blocks_triton import attend_blocks
from sangam_worker.attention.protocol import FixedBatch

_dot_as_interpreted = InterpreterBuilder.create_dot


def _widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), tl.float32)


def _dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
    return _dot_as_interpreted(self, _widened(a), _widened(b), *rest)


InterpreterBuilder.create_dot = _dot


def run(
    q: Tensor, pages: Tensor, batch: FixedBatch, tiling: Tiling, workspace: Tensor, answers: Tensor
) -> Tensor:
    """The answers as the kernel leaves them."""
    attend_blocks(q, pages, batch, tiling, workspace, answers)
    return answers
