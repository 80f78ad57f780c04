"""What a layer does between its products: norms, gate, rotation. A protocol and plain torch.

Decides how each is computed and what is fused with what; which rows and weights go in is the
``transformer``'s business, which calls it. ``flashinfer_operators`` has the same on CUDA in few
kernels. The torch ones are what CPUs use: their order of operations is part of *same bytes*
(design section 3), so a change here changes what every request gets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sangam_worker.models.description import ModelConfig
from sangam_worker.models.linear import Linear, linear
from sangam_worker.models.rope import RotaryTable, rotate

GateUp = Callable[[Tensor], Tensor]
"""``[rows, hidden]`` to ``[rows, mlp]``: SiLU of the gate's product times the up product."""


class Rotation(Protocol):
    """Rotary embedding at the positions of some rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate ``[rows, heads, head_dim]`` (its memory may be taken over)."""
        ...

    def select(self, rows: Tensor) -> "Rotation":
        """The same for a choice of the rows."""
        ...


class Operators(Protocol):
    """The operators of one model on one device."""

    def gate_up(self, gate: Tensor, up: Tensor) -> GateUp:
        """The first half of an MLP from its weights ``[mlp, hidden]``, which it takes over."""
        ...

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of ``[rows, hidden]`` with the model's epsilon."""
        ...

    def add_norm(
        self, product: Linear, inputs: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``x + product(inputs)`` and its norm, ``[rows, hidden]`` each; takes x's memory over."""
        ...

    def rotation(self, positions: Tensor) -> Rotation:
        """What rotates rows at ``positions``, ``[rows]``, all below what was reserved."""
        ...

    def reserve(self, num_positions: int) -> None:
        """Make sure that positions below ``num_positions`` can be rotated."""
        ...


OperatorsFactory = Callable[[ModelConfig, torch.dtype, torch.device], Operators]
"""Operators of a model whose weights have a dtype and are on a device."""


@dataclass(frozen=True, slots=True)
class TorchRotation:
    """cos ``[rows, 1, head_dim]`` and sin ``[rows, 1, head_dim / 2]`` of the rows."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate ``[rows, heads, head_dim]``."""
        return rotate(x, self.cos, self.sin)

    def select(self, rows: Tensor) -> "TorchRotation":
        """The same for a choice of the rows."""
        return TorchRotation(self.cos.index_select(0, rows), self.sin.index_select(0, rows))


class TorchOperators:
    """``Operators`` on any device and in any dtype."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._norm_eps = config.norm_eps
        # dllm-semantics section a: LLaDA rotates in float32, Dream in the model's dtype.
        self._rope = RotaryTable(
            config, torch.float32 if config.is_rope_in_float32 else dtype, device
        )

    def gate_up(self, gate: Tensor, up: Tensor) -> GateUp:
        """Two products, the second one times the first."""
        gate_product, up_product = linear(gate), linear(up)
        return lambda x: up_product.times(x, gate_product.silu(x))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm in float32, rounded to the model's dtype, *then* times the weight."""
        wide = x.float()
        scale = (wide * wide).mean(-1, keepdim=True).add_(self._norm_eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)

    def add_norm(
        self, product: Linear, inputs: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The sum inside the product, then the norm."""
        x = product.plus(inputs, x)
        return x, self.norm(x, weight)

    def rotation(self, positions: Tensor) -> TorchRotation:
        """cos and sin of the positions."""
        return TorchRotation(*self._rope.rows(positions))

    def reserve(self, num_positions: int) -> None:
        """Make sure that positions below ``num_positions`` are in the table."""
        self._rope.reserve(num_positions)
