"""The gate's kernel where Triton interprets: what the other process runs.

The interpreter cuts bfloat16 off where the GPU rounds; torch's rounding stands in for it.
"""

import tests.worker.fp8_interpreted  # noqa: F401 - puts torch's rounding in
from torch import Tensor

from sangam_worker.models.gate_triton import silu_and_mul


def run(gate_up: Tensor) -> Tensor:
    """The kernel's result."""
    return silu_and_mul(gate_up)
