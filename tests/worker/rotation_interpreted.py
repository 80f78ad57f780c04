"""The rotation's kernel where Triton interprets: what the other process runs.

The interpreter cuts bfloat16 off where the GPU rounds; torch's rounding stands in for it.
"""

import tests.worker.fp8_interpreted  # noqa: F401 - puts torch's rounding in
from torch import Tensor

from sangam_worker.models.rotation_triton import rotate_and_keep


def run(
    qkv: Tensor, positions: Tensor, table: Tensor, pages: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """What the kernel leaves in the rows and on the pages."""
    rotate_and_keep(qkv, positions, table, pages, slots)
    return qkv, pages
