"""FP8 in plain torch, for any device: what the Triton kernels and cuBLAS are compared with.

Decides the order of operations, which the kernels repeat: entries are float32 from the first
operation to the rounding, and a norm's factor goes into the row's scale, so that it does not touch
the rounded entries. Called by ``fp8_operators`` on CPUs, where it shows what FP8 does to a model's
answers and saves nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sangam_worker.models.fp8 import Fp8Rows, quantise
from sangam_worker.models.linear import linear


class TorchFp8Kernels:
    """``Fp8Kernels`` of ``fp8_operators``."""

    def product(self, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> "WideProduct":
        """Sums in float32."""
        return WideProduct(weight, bias, dtype)

    def quantise(self, x: Tensor) -> Fp8Rows:
        """The rows as they are."""
        return quantise(x)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
        """RMS norm, not rounded before the weight."""
        wide = x.float()
        factors = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
        return quantise(wide * weight.float(), factors)

    def add_norm(self, added: Tensor, x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
        """The norm of the sum as it is stored: rounded to x's dtype."""
        return self.norm(x.add_(added), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Fp8Rows:
        """The halves of each row."""
        gate, up = gate_up.float().chunk(2, -1)
        return quantise(F.silu(gate) * up)


class WideProduct:
    """A product of e4m3 rows in float32, where each single product is exact.

    A row's result does not depend on the other rows (see ``linear``).
    """

    def __init__(self, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._product = linear(weight.values.float())
        self._scales = weight.scales.view(1, -1)
        self._bias, self._dtype = bias, dtype

    def __call__(self, rows: Fp8Rows) -> Tensor:
        """``[rows, in]`` to ``[rows, out]`` in the model's dtype, rounded once."""
        wide = self._product(rows.values.float()).mul_(rows.scales).mul_(self._scales)
        if self._bias is not None:
            wide.add_(self._bias)
        return wide.to(self._dtype)
