"""Rows in FP8: e4m3 entries, and one float32 scale a row that turns them back.

Decides how a row is rounded. Weights are rounded by it once, a row being an output channel;
activations a row at a time on the fly (``fp8_kernels`` computes the same in Triton, ``fp8_torch``
in torch). Called by ``weights`` and ``fp8_operators``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3; a row's largest entry becomes it."""

SMALLEST = 1e-30
"""A row's largest entry counts as at least this, so that rows of zeros stay zeros and the
quotient stays finite."""

_ROWS_AT_A_TIME = 1024
"""Of a weight: its float32 copies stay small beside a layer."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """``values * scales``, rounded from a matrix.

    Attributes:
        values: e4m3 ``[rows, width]``. scales: float32 ``[rows, 1]``.
    """

    values: Tensor
    scales: Tensor

    @staticmethod
    def empty(shape: Sequence[int], device: torch.device) -> "Fp8Rows":
        """Memory for a matrix."""
        return Fp8Rows(
            torch.empty(shape, dtype=DTYPE, device=device),
            torch.empty((shape[0], 1), dtype=torch.float32, device=device),
        )

    def __getitem__(self, rows: slice) -> "Fp8Rows":
        """Some of the rows, in the same memory."""
        return Fp8Rows(self.values[rows], self.scales[rows])

    def copy_(self, matrix: Tensor) -> None:
        """Round a matrix of the same shape, from any device, into this memory."""
        for first in range(0, len(matrix), _ROWS_AT_A_TIME):
            rows = slice(first, first + _ROWS_AT_A_TIME)
            rounded = quantise(matrix[rows].to(self.values.device))
            self.values[rows].copy_(rounded.values)
            self.scales[rows].copy_(rounded.scales)

    def index_select(self, dim: int, rows: Tensor) -> "Fp8Rows":
        """A choice of the rows, as torch's for ``dim`` 0."""
        assert dim == 0
        values = self.values.view(torch.uint8).index_select(0, rows).view(DTYPE)
        return Fp8Rows(values, self.scales.index_select(0, rows))

    @staticmethod
    def cat(parts: Sequence["Fp8Rows"]) -> "Fp8Rows":
        """The rows of several, in order."""
        # Bytes: not every release of torch copies e4m3 in all of its kernels.
        values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(DTYPE)
        return Fp8Rows(values, torch.cat([part.scales for part in parts]))

    def wide(self) -> Tensor:
        """The matrix that the rows stand for, float32."""
        return self.values.float() * self.scales


def quantise(matrix: Tensor, factors: Tensor | None = None) -> Fp8Rows:
    """Round each row of ``[rows, width]`` so that its largest entry becomes ``LARGEST``.

    A row with an infinity or a NaN has NaNs in it afterwards, so that every product with it is
    NaN: sampling then says that the pass has failed.

    Args:
        factors: float32 ``[rows, 1]``; what the rows are to be multiplied with. It changes scales
            only.
    """
    wide = matrix.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST)
    # As a tensor on the device: of a quotient with a number, or with a tensor of one number on the
    # host, torch makes a product with a rounded reciprocal (on CUDA of either side).
    limit = torch.full_like(largest, LARGEST)
    values = (wide * (limit / largest)).to(DTYPE)
    scales = largest / limit
    return Fp8Rows(values, scales if factors is None else scales * factors)
