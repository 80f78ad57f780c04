"""How far a number format moves logits: float32 passes with random errors of its roundings' size.

No useful bound can be had by counting roundings: how much a model amplifies an error differs from
row to row by a factor of 30, and worst cases add up to more than the logits themselves. What can be
had is Monte Carlo arithmetic (Parker 1997): run the float32 model again, put a random relative
error wherever the format rounds, and see how far each row of logits moves. First-order errors
being linear, the engine under test moves by a draw from the same distribution. ``forcing``
runs these engines beside the one under test; nothing here knows which kernels that one uses.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sangam_worker.fastest import Stopwatch
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.linear import Linear
from sangam_worker.models.operators import OperatorsFactory, Rotation, TorchOperators

_RMS_OF_ROUNDING = math.sqrt((1 - 2**-2) / (2 * math.log(2)) / 3)
"""0.42: the root mean square of a rounding in units of half a last place. The error is uniform on
+-half a unit of last place, which is 1/m of a number with mantissa m; the mean of 1/m^2 over
mantissas that are log-uniform on 1..2 is (1 - 1/4) / (2 ln 2)."""

_ROUNDINGS_OF_INPUT = 2
"""Of what enters a product: norms round before and after their weight; attention rounds its
probabilities and its result."""

_ROUNDINGS_OF_ROTATION = 2
"""LLaDA rounds once, Dream (cosine, sine, two products, their sum) more often but of parts."""


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Relative root-mean-square errors by which an engine may differ from the float32 one.

    Attributes:
        rounding: of one result. product_rounding: of a layer product's weights and inputs, each,
            on top of that (FP8). summation: of a sum, per square root of its terms.
    """

    rounding: float = 0.0
    product_rounding: float = 0.0
    summation: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether results must be the same bit for bit."""
        return not (self.rounding or self.product_rounding or self.summation)


def number_format(
    *, dtype: str, device: str = "cpu", attention: str = "torch", quantization: str = "none"
) -> NumberFormat:
    """The format of an engine built with these names (see ``load_engine``).

    float32 on a CPU with plain torch is the reference itself: nothing may differ.
    """
    is_reference = device == "cpu" and attention == "torch" and quantization == "none"
    if dtype == "float32" and is_reference:
        return NumberFormat()
    bits = {"float32": 24, "bfloat16": 8}[dtype]
    return NumberFormat(
        rounding=_rms_of_bits(bits),
        product_rounding=_rms_of_bits(_FP8_BITS) if quantization == "fp8" else 0.0,
        summation=_rms_of_bits(24),
    )


_FP8_BITS = 4
"""Significant bits of e4m3, the hidden one included."""


def _rms_of_bits(bits: int) -> float:
    return _RMS_OF_ROUNDING * 2.0**-bits


class Errors:
    """Draws random relative errors; one for each perturbed engine."""

    def __init__(self, kind: NumberFormat, seed: int) -> None:
        self.kind = kind
        self._generator = torch.Generator().manual_seed(seed)

    def rounded(self, x: Tensor, times: int = 1) -> Tensor:
        """``x`` after some roundings: each entry by its own size."""
        return x * (1 + self._drawn(x, self.kind.rounding * math.sqrt(times)))

    def of_input(self, x: Tensor) -> Tensor:
        """``x`` as a layer's product reads it."""
        x = self.rounded(x, _ROUNDINGS_OF_INPUT)
        if self.kind.product_rounding:
            x = x * (1 + self._drawn(x, self.kind.product_rounding))
        return x

    def of_product(self, y: Tensor, num_terms: int) -> Tensor:
        """A product's result: its weights are rounded, its sums are made otherwise, it is rounded.

        What weights and sums do to an entry does not shrink with the entry: it is of the size of
        the whole row ``[rows, out]``.
        """
        return self._multiplied(y, num_terms, self.kind.product_rounding)

    def of_head(self, logits: Tensor, num_terms: int) -> Tensor:
        """The head's result: its weights are never FP8."""
        return self._multiplied(logits, num_terms, 0.0)

    def _multiplied(self, y: Tensor, num_terms: int, of_weights: float) -> Tensor:
        kind = self.kind
        of_row = math.hypot(kind.rounding, of_weights, kind.summation * math.sqrt(num_terms))
        size = y.square().mean(-1, keepdim=True).sqrt()
        return self.rounded(y + size * self._drawn(y, of_row))

    def _drawn(self, x: Tensor, size: float) -> Tensor:
        return size * torch.randn(x.shape, generator=self._generator)


@dataclass(frozen=True, slots=True)
class _Product:
    """A product with errors in what it reads and gives."""

    plain: Linear
    num_terms: int
    errors: Errors

    def __call__(self, x: Tensor) -> Tensor:
        return self.errors.of_product(self.plain(self.errors.of_input(x)), self.num_terms)


@dataclass(frozen=True, slots=True)
class _Rotation:
    plain: Rotation
    errors: Errors

    def __call__(self, x: Tensor) -> Tensor:
        return self.errors.rounded(self.plain(x), _ROUNDINGS_OF_ROTATION)

    def select(self, rows: Tensor) -> "_Rotation":
        return _Rotation(self.plain.select(rows), self.errors)


class PerturbedOperators:
    """``Operators`` in float32 on a CPU that err as a number format does."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, errors: Errors
    ) -> None:
        self._torch, self._errors = TorchOperators(config, dtype, device), errors

    def product(self, weight: Tensor, bias: Tensor | None = None) -> _Product:
        """The plain product, perturbed."""
        return _Product(self._torch.product(weight, bias), weight.shape[1], self._errors)

    def gate_up(self, gate: Tensor, up: Tensor) -> Callable[[Tensor], Tensor]:
        """Two products, and a rounding of what is made of them."""
        gate_product, up_product = self.product(gate), self.product(up)
        return lambda x: self._errors.rounded(F.silu(gate_product(x)) * up_product(x))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm of the embeddings, which are rounded."""
        return self._torch.norm(self._errors.rounded(x), weight)

    def add_norm(
        self,
        product: _Product,
        inputs: Tensor,
        x: Tensor,
        weight: Tensor,
        *,
        is_final: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The sum is rounded; the norm where it is read, for the head here."""
        x = self._errors.rounded(x + product(inputs))
        normed = self._torch.norm(x, weight)
        return x, self._errors.rounded(normed, _ROUNDINGS_OF_INPUT) if is_final else normed

    def rotation(self, positions: Tensor) -> _Rotation:
        """Queries and keys are rounded again."""
        return _Rotation(self._torch.rotation(positions), self._errors)

    def reserve(self, num_positions: int) -> None:
        """Make sure that positions below ``num_positions`` can be rotated."""
        self._torch.reserve(num_positions)

    def choose(self, num_rows: int, measure: Stopwatch) -> dict[str, str]:
        """There is no choice."""
        return self._torch.choose(num_rows, measure)

    def chosen(self) -> AbstractContextManager[None]:
        """There was no choice."""
        return self._torch.chosen()


def perturbed_operators(kind: NumberFormat, seed: int) -> tuple[OperatorsFactory, Errors]:
    """For ``load_engine``, and what its head's logits are to be perturbed with."""
    errors = Errors(kind, seed)
    return partial(PerturbedOperators, errors=errors), errors
