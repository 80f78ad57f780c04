"""What a layer does between its products: norms, gate, rotation. A protocol and plain torch.

Decides how each is computed and what is fused with what; which rows and weights go in is the
``transformer``'s business, which calls it. ``flashinfer_operators`` has the same on CUDA in few
kernels. The torch ones are what CPUs use: their order of operations is part of *same bytes*
(design section 3), so a change here changes what every request gets.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from sangam_worker.fastest import Stopwatch
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.linear import Linear, linear
from sangam_worker.models.rope import RotaryTable, rotate

Rows = TypeVar("Rows")
"""Rows as a layer's products take them: a tensor, or what stands for one (``fp8``)."""

LayerProduct = TypeVar("LayerProduct")
"""A product of a layer: callable on its rows, giving a tensor."""

GateUp = Callable[[Rows], Rows]
"""``[rows, hidden]`` to ``[rows, mlp]``: SiLU of the gate's product times the up product."""


class Rotation(Protocol):
    """Rotary embedding at the positions of some rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate ``[rows, heads, head_dim]`` (its memory may be taken over)."""
        ...

    def select(self, rows: Tensor) -> "Rotation":
        """The same for a choice of the rows."""
        ...


@runtime_checkable
class KeepingRotation(Rotation, Protocol):
    """A rotation that may have an operator for what follows it."""

    def keep(self, qkv: Tensor, pages: Tensor, slots: Tensor) -> bool:
        """Rotate the queries in place, and keep keys, rotated, and values where they belong.

        Args:
            qkv: ``[rows, heads + 2 * kv_heads, head_dim]``; what is in it of keys and values is of
                no use afterwards. pages, slots: of ``attention.protocol.Places``.

        Returns:
            Whether that was done; otherwise nothing was.
        """
        ...


class Operators(Protocol[LayerProduct, Rows]):
    """The operators of one model on one device.

    Weights of layers are as the loader keeps them for these operators.
    """

    def product(self, weight: Any, bias: Tensor | None = None) -> LayerProduct:
        """A product of a layer from its weight ``[out, in]``, which it takes over."""
        ...

    def gate_up(self, gate: Any, up: Any) -> GateUp[Rows]:
        """The first half of an MLP from its weights ``[mlp, hidden]``, which it takes over."""
        ...

    def norm(self, x: Tensor, weight: Tensor) -> Rows:
        """RMS norm of ``[rows, hidden]`` with the model's epsilon, for the layer's products."""
        ...

    def add_norm(
        self,
        product: LayerProduct,
        inputs: Tensor | Rows,
        x: Tensor,
        weight: Tensor,
        *,
        is_final: bool = False,
    ) -> tuple[Tensor, Tensor | Rows]:
        """``x + product(inputs)`` and its norm, ``[rows, hidden]`` each; takes x's memory over.

        Args:
            inputs: attention's results, or the gate's.
            is_final: the norm is for the head, which takes a tensor.
        """
        ...

    def rotation(self, positions: Tensor) -> Rotation:
        """What rotates rows at ``positions``, ``[rows]``, all below what was reserved."""
        ...

    def reserve(self, num_positions: int) -> None:
        """Make sure that positions below ``num_positions`` can be rotated."""
        ...

    def choose(self, num_rows: int, measure: Stopwatch) -> dict[str, str]:
        """Find out how so many rows are multiplied fastest, if there is a choice.

        Returns:
            In words, what was chosen for which weights.
        """
        ...

    def chosen(self) -> AbstractContextManager[None]:
        """Within it rows are multiplied as ``choose`` found."""
        ...


OperatorsFactory = Callable[[ModelConfig, torch.dtype, torch.device], Operators[Any, Any]]
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

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The fastest there is."""
        return linear(weight, bias)

    def gate_up(self, gate: Tensor, up: Tensor) -> GateUp[Tensor]:
        """Two products, the second one times the first."""
        gate_product, up_product = linear(gate), linear(up)
        return lambda x: up_product.times(x, gate_product.silu(x))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm in float32, rounded to the model's dtype, *then* times the weight."""
        wide = x.float()
        scale = (wide * wide).mean(-1, keepdim=True).add_(self._norm_eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)

    def add_norm(
        self,
        product: Linear,
        inputs: Tensor,
        x: Tensor,
        weight: Tensor,
        *,
        is_final: bool = False,
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

    def choose(self, num_rows: int, measure: Stopwatch) -> dict[str, str]:
        """There is no choice."""
        return {}

    def chosen(self) -> AbstractContextManager[None]:
        """There was no choice."""
        return nullcontext()
