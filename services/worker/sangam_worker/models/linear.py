"""Matrix products of the transformer, with what follows them fused where that is possible.

Decides how weights are laid out; ``transformer`` calls it. On a CPU in float32 large weights are
kept in oneDNN's blocked layout: at decode sizes that is half as fast again as the BLAS call, which
repacks the weights every time. Small ones are not: calling oneDNN costs some 12 microseconds more.
Either way a row's result does not depend on the other rows, as long as there are at least
``MIN_ROWS`` (below a few rows BLAS takes other paths); the tests check it bitwise on the machine at
hand.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ROWS = 16
"""Rows of every product are padded to a multiple of this.

It also keeps element-wise kernels (silu, exp) from treating a packed batch's last elements in
their scalar tail loop, which rounds differently: 16 rows of any even width are whole vectors.
"""

PACKED_MIN_WEIGHTS = 2**17
"""Entries from which a weight is packed. Measured at 32 rows: 192 x 512 gains nothing, 192 x 1024
a third. The choice must not depend on the number of rows, or equal rows would differ."""


def padded_rows(num_rows: int) -> int:
    """``num_rows`` rounded up to whole units of ``MIN_ROWS``, at least one."""
    return max(1, -(-num_rows // MIN_ROWS)) * MIN_ROWS


class Linear(Protocol):
    """``x @ weight.T + bias`` for x ``[rows, in]``, giving ``[rows, out]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        ...

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The product times ``other`` ``[rows, out]``, element by element."""
        ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product plus ``other`` ``[rows, out]``."""
        ...


class PlainLinear:
    """Any device and dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.t(), bias

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        if self._bias is None:
            return torch.mm(x, self._weight)
        return torch.addmm(self._bias, x, self._weight)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        return F.silu(self(x), inplace=True)

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The product times ``other``."""
        return self(x).mul_(other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product plus ``other``."""
        if self._bias is None:
            return torch.addmm(other, x, self._weight)
        return self(x).add_(other)


class PackedLinear:
    """float32 on a CPU, weights in oneDNN's layout (the operators that torch.compile emits)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 2 * MIN_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return _pointwise(x, self._weight, self._bias, "none")

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        return _pointwise(x, self._weight, self._bias, "swish")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The product times ``other``."""
        return _binary(x, other, self._weight, self._bias, "mul")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product plus ``other``."""
        return _binary(x, other, self._weight, self._bias, "add")


def _pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, attribute: str) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, attribute, [], "")
    return result


def _binary(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, name)
    return result


def _can_pack() -> bool:
    return (
        torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest product for a weight ``[out, in]`` (its memory may be taken over)."""
    is_float32_on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    if is_float32_on_cpu and weight.numel() >= PACKED_MIN_WEIGHTS and _can_pack():
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
