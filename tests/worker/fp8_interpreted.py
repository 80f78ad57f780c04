"""The FP8 kernels where Triton interprets: what the other process runs.

The interpreter's own casts to narrow floats are not the GPU's: bfloat16 is cut off, of e4m3 a
carry into an odd exponent and subnormals are lost. torch's stand in for them; that the compiled
kernel has the one instruction for the cast is another test's.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import Tensor

from sangam_worker.models.fp8 import DTYPE
from sangam_worker.models.fp8_triton import TritonFp8Kernels

_convert_as_interpreted = interpreter._convert_float
_ROUNDED = {tl.float8e4nv: (DTYPE, torch.uint8), tl.bfloat16: (torch.bfloat16, torch.uint16)}


def _convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    if source != tl.float32 or target not in _ROUNDED:
        return _convert_as_interpreted(data, source, target, rounding)
    dtype, bits = _ROUNDED[target]
    return torch.from_numpy(np.ascontiguousarray(data)).to(dtype).view(bits).numpy()


interpreter._convert_float = _convert


def run(name: str, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """A kernel's entries, as bytes since e4m3 cannot be pickled, and scales; its arguments
    afterwards, since one of them may have been written."""
    rows = getattr(TritonFp8Kernels(), name)(*arguments)
    return rows.values.view(torch.uint8), rows.scales, arguments
