"""A layer's operators with FP8 products: opt-in, ``quantization`` ``fp8``.

Decides which products are FP8 (all of a layer; head, embedding, norms, attention and sampling stay
as they are), where activations are rounded, and where FP8 can run. What it is wrapped around
rotates, and norms for the head. Called by ``engine_loading``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from sangam_core.errors import ConfigurationError
from sangam_worker.extras import HOW_TO_INSTALL
from sangam_worker.fastest import Stopwatch
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.fp8 import Fp8Rows
from sangam_worker.models.fp8_torch import TorchFp8Kernels
from sangam_worker.models.operators import GateUp, Operators, OperatorsFactory, Rotation
from sangam_worker.triton_compiler import first_use

WIDTH_UNIT = 16
"""cuBLAS multiplies e4m3 matrices whose widths are multiples of this (bytes)."""

FIRST_CAPABILITY = (8, 9)
"""The first compute capability that multiplies e4m3."""

Fp8Product = Callable[[Fp8Rows], Tensor]


class Fp8Kernels(Protocol):
    """What differs between devices. Rows come in any float dtype and contiguous."""

    def product(self, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> Fp8Product:
        """``rows @ weight.T + bias``, given in a dtype."""
        ...

    def quantise(self, x: Tensor) -> Fp8Rows:
        """Rows rounded."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
        """RMS norm of rows, rounded."""
        ...

    def add_norm(self, added: Tensor, x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
        """RMS norm, rounded, of ``x + added``, which is written to x's memory."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Fp8Rows:
        """SiLU of the first half of each row times its second half, rounded."""
        ...


class Fp8Operators:
    """``Operators`` whose products take rows in FP8.

    Args:
        inner: those of the model's dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        inner: Operators[Any, Tensor],
        kernels: Fp8Kernels,
    ) -> None:
        self._norm_eps, self._dtype = config.norm_eps, dtype
        self._inner, self._kernels = inner, kernels

    def product(self, weight: Fp8Rows, bias: Tensor | None = None) -> Fp8Product:
        """One product of e4m3 matrices."""
        return self._kernels.product(weight, bias, self._dtype)

    def gate_up(self, gate: Fp8Rows, up: Fp8Rows) -> GateUp[Fp8Rows]:
        """One product of both weights, then one kernel."""
        product, silu_mul = self.product(Fp8Rows.cat((gate, up))), self._kernels.silu_mul
        return lambda rows: silu_mul(product(rows))

    def norm(self, x: Tensor, weight: Tensor) -> Fp8Rows:
        """The norm, rounded in the same kernel."""
        return self._kernels.norm(x, weight, self._norm_eps)

    def add_norm(
        self,
        product: Fp8Product,
        inputs: Tensor | Fp8Rows,
        x: Tensor,
        weight: Tensor,
        *,
        is_final: bool = False,
    ) -> tuple[Tensor, Tensor | Fp8Rows]:
        """Sum, norm and rounding in one kernel; attention's results need one of their own."""
        rows = inputs if isinstance(inputs, Fp8Rows) else self._kernels.quantise(inputs)
        added = product(rows)
        if is_final:
            return x.add_(added), self._inner.norm(x, weight)
        return x, self._kernels.add_norm(added, x, weight, self._norm_eps)

    def rotation(self, positions: Tensor) -> Rotation:
        """As without FP8."""
        return self._inner.rotation(positions)

    def reserve(self, num_positions: int) -> None:
        """As without FP8."""
        self._inner.reserve(num_positions)

    def choose(self, num_rows: int, measure: Stopwatch) -> dict[str, str]:
        """Among products in the model's dtype; those in FP8 leave no choice."""
        return self._inner.choose(num_rows, measure)

    def chosen(self) -> AbstractContextManager[None]:
        """As without FP8."""
        return self._inner.chosen()


def with_fp8(operators: OperatorsFactory, kernels: Fp8Kernels) -> OperatorsFactory:
    """FP8 around the operators of a model's dtype; making them compiles the kernels."""

    def made(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Fp8Operators:
        with first_use("FP8's kernels"):
            _run_once(kernels, config, dtype, device)
        return Fp8Operators(config, dtype, operators(config, dtype, device), kernels)

    return made


def fp8_kernels(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Fp8Kernels:
    """Those of a device: torch's wherever there is no CUDA.

    Raises:
        ConfigurationError: FP8 cannot run there, or not with this model.
    """
    if device.type != "cuda":
        return TorchFp8Kernels()
    check_cuda(config, dtype, torch.cuda.get_device_capability(device))
    try:
        from sangam_worker.models.fp8_triton import TritonFp8Kernels
    except ImportError as error:
        raise ConfigurationError(
            f"quantization 'fp8' on {str(device)!r} needs Triton, which cannot be imported "
            f"({error}); {HOW_TO_INSTALL}"
        ) from None
    return TritonFp8Kernels()


def check_cuda(config: ModelConfig, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Whether a GPU multiplies this model in FP8. ``ConfigurationError`` says why not."""
    if capability < FIRST_CAPABILITY:
        raise ConfigurationError(
            f"quantization 'fp8' needs a GPU of compute capability "
            f"{'.'.join(map(str, FIRST_CAPABILITY))} or newer (Ada, Hopper), not "
            f"{'.'.join(map(str, capability))}; use 'none'"
        )
    if dtype != torch.bfloat16:
        raise ConfigurationError(
            f"quantization 'fp8' on a GPU needs dtype bfloat16, not {str(dtype)[6:]}"
        )
    widths = {
        "hidden size": config.hidden_size,
        "width of its query heads": config.num_heads * config.head_dim,
        "width of its key heads": config.num_kv_heads * config.head_dim,
        "MLP size": config.mlp_size,
    }
    for name, width in widths.items():
        if width % WIDTH_UNIT:
            raise ConfigurationError(
                f"quantization 'fp8' needs widths that are multiples of {WIDTH_UNIT}, but the "
                f"{name} of {config.name} is {width}; use 'none'"
            )


def _run_once(
    kernels: Fp8Kernels, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Each kernel at the model's widths: Triton compiles on first use."""
    hidden = torch.zeros((1, config.hidden_size), dtype=dtype, device=device)
    kernels.norm(hidden, hidden[0], config.norm_eps)
    kernels.add_norm(hidden, hidden.clone(), hidden[0], config.norm_eps)
    kernels.quantise(hidden.new_zeros((1, config.num_heads * config.head_dim)))
    kernels.silu_mul(hidden.new_zeros((1, 2 * config.mlp_size)))
