"""Products by the fastest algorithm: for each number of rows that graphs have, each weight's shape.

cuBLAS picks an algorithm by a model of the device, for one product at a time. Which one is fastest
for 32 or 256 rows of weights that come from memory is measured here, through all layers, beside
what torch does. Decides what is tried; ``cublaslt`` multiplies. Made by ``flashinfer_operators``,
told by ``transformer`` which numbers of rows matter; others, in passes that are no graph's, are
torch's.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import structlog
import torch
from torch import Tensor

from sangam_worker.fastest import Stopwatch, fastest
from sangam_worker.models.cublaslt import CublasLt, Shape
from sangam_worker.models.linear import PlainLinear

log = structlog.get_logger(__name__)

_TORCH = "torch"


@dataclass(slots=True, eq=False)
class _Group:
    """Weights of one shape.

    Attributes:
        algorithms: chosen, by numbers of rows; torch's where there is none.
    """

    linears: list["MeasuredLinear"] = field(default_factory=list)
    algorithms: dict[int, int] = field(default_factory=dict)


class MeasuredLinear(PlainLinear):
    """A product that asks its group for an algorithm where algorithms are chosen."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        products: "MeasuredProducts",
        algorithms: dict[int, int],
    ) -> None:
        super().__init__(weight, bias)
        self._products, self._algorithms = products, algorithms

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        if self._products.are_chosen and x.is_contiguous():
            return self.by(self._algorithms.get(len(x)), x)
        return super().__call__(x)

    def by(self, algorithm: int | None, x: Tensor) -> Tensor:
        """The product by one of the algorithms, or as torch does it."""
        if algorithm is None:
            return super().__call__(x)
        return self._products.library.product(algorithm, x, self._weight.t(), self._bias)

    def random_rows(self, num_rows: int) -> Tensor:
        """Rows to try it with."""
        weight = self._weight
        return torch.randn(num_rows, len(weight), dtype=weight.dtype, device=weight.device)


class MeasuredProducts:
    """The products of one model's layers.

    Attributes:
        are_chosen: within ``chosen``.
    """

    def __init__(self, library: CublasLt) -> None:
        self.library, self.are_chosen = library, False
        self._groups: dict[tuple[int, int, bool], _Group] = {}

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> MeasuredLinear:
        """A product of a weight ``[out, in]``, which it takes over."""
        key = weight.shape[1], weight.shape[0], bias is not None
        group = self._groups.setdefault(key, _Group())
        made = MeasuredLinear(weight.contiguous(), bias, self, group.algorithms)
        group.linears.append(made)
        return made

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Within it rows are multiplied as ``choose`` found; otherwise as torch does it.

        Calling the library takes the host longer than calling torch, 15 to 30 microseconds: graphs
        do it once.
        """
        self.are_chosen = True
        try:
            yield
        finally:
            self.are_chosen = False

    def choose(self, num_rows: int, measure: Stopwatch) -> dict[str, str]:
        """Find the fastest algorithm of every shape for so many rows; in words, what it is.

        Weights are multiplied with random rows, all of a shape one after the other.
        """
        told = {}
        for (num_inputs, num_outputs, has_bias), group in self._groups.items():
            group.algorithms.pop(num_rows, None)
            shape = Shape(num_rows, num_inputs, num_outputs, has_bias)
            product = f"{num_inputs}x{num_outputs}" + " + bias" * has_bias
            numbers = {str(each): each for each in range(self._num_algorithms(shape, product))}
            x = group.linears[0].random_rows(num_rows)
            chosen = fastest(
                f"algorithm for {num_rows}x{product}",
                [_TORCH, *numbers],
                partial(_tried, group.linears, x, numbers, measure),
            )
            told[product] = str(chosen)
            if chosen.name in numbers:
                group.algorithms[num_rows] = numbers[chosen.name]
        return told

    def _num_algorithms(self, shape: Shape, product: str) -> int:
        """None where the library has none, which it says by an error of its own."""
        try:
            return self.library.num_algorithms(shape)
        except Exception as error:  # noqa: BLE001 - the bindings' own, of whatever class
            log.warning(
                "no algorithms to choose from",
                name=f"{shape.num_rows}x{product}",
                error=str(error)[:300],
            )
            return 0


def _tried(
    linears: Sequence[MeasuredLinear],
    x: Tensor,
    numbers: Mapping[str, int],
    measure: Stopwatch,
    name: str,
) -> tuple[float, Tensor]:
    """Seconds of all products with the rows, one after the other: no weight is left in the cache.

    With them the last one's result.
    """
    algorithm, out = numbers.get(name), x

    def run() -> None:
        nonlocal out
        for each in linears:
            out = each.by(algorithm, x)

    seconds = measure(run)
    return seconds, out.to(torch.float32, copy=True)
