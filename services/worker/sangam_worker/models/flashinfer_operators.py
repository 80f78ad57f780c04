"""FlashInfer's operators between the products: fewer kernels, and fewer trips through memory.

Decides which of them FlashInfer computes: shapes that it has no kernel for (the golden models')
stay with torch, and on a GPU the gate is ``gate_triton``'s, rotation and the keeping of K and V
``rotation_triton``'s. Called by ``transformer`` through the protocol. All compute in float32 and
round once, where the published code rounds in between (norms before the weight, Dream's rotation
product by product); tests bound the difference.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from sangam_core.errors import ConfigurationError
from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.extras import HOW_TO_INSTALL
from sangam_worker.fastest import Stopwatch
from sangam_worker.flashinfer_library import HEAD_DIMS, FlashInfer, load_flashinfer
from sangam_worker.models.cublaslt import load_cublaslt
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.linear import Linear, linear
from sangam_worker.models.measured_products import MeasuredProducts
from sangam_worker.models.operators import GateUp, KeepingRotation, Rotation, TorchOperators
from sangam_worker.models.rope import RotaryTable
from sangam_worker.triton_compiler import first_use

log = structlog.get_logger(__name__)

_VECTOR_BYTES = 16
"""Both halves of what the SiLU-mul kernel reads must be aligned to this."""


RotateAndKeep = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""``rotation_triton.rotate_and_keep``, or a stand-in."""


@dataclass(frozen=True, slots=True)
class FusedRotation:
    """Rotates in place.

    Attributes:
        table: float32 ``[positions, head_dim]``, cos then sin. rotate_and_keep: if there is one.
    """

    library: FlashInfer
    table: Tensor
    positions: Tensor
    rotate_and_keep: RotateAndKeep | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate ``[rows, heads, head_dim]``, which may be part of wider rows.

        The kernel turns queries and keys alike, so any cut between them does; it needs both.
        """
        keys = x[:, -1:] if x.shape[1] > 1 else x.new_empty(x.shape)
        queries = x[:, :-1] if x.shape[1] > 1 else x
        self.library.apply_rope_with_cos_sin_cache_inplace(
            self.positions, queries, keys, x.shape[2], self.table, is_neox=True
        )
        return x

    def select(self, rows: Tensor) -> "FusedRotation":
        """The same for a choice of the rows."""
        return FusedRotation(self.library, self.table, self.positions.index_select(0, rows))

    def keep(self, qkv: Tensor, pages: Tensor, slots: Tensor) -> bool:
        """In one kernel."""
        if self.rotate_and_keep is None:
            return False
        self.rotate_and_keep(qkv, self.positions, self.table, pages, slots)
        return True


class FlashInferOperators:
    """``Operators`` in bfloat16.

    Args:
        library: ``flashinfer``, or a fake of its semantics.
        silu_and_mul: in place of the library's. rotate_and_keep: in place of its rotation and
            append, where both are wanted. products: in place of torch's.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        library: FlashInfer,
        silu_and_mul: Callable[[Tensor], Tensor] | None = None,
        rotate_and_keep: RotateAndKeep | None = None,
        products: MeasuredProducts | None = None,
    ) -> None:
        self._products = products
        self._library, self._norm_eps = library, config.norm_eps
        self._rotate_and_keep = rotate_and_keep
        self._silu_and_mul = silu_and_mul or library.silu_and_mul
        self._torch = TorchOperators(config, dtype, device)
        self._is_rotation_fused = config.head_dim in HEAD_DIMS
        if self._is_rotation_fused:
            # Dream's angles are rounded to the model's dtype, as its own code has them.
            angles = torch.float32 if config.is_rope_in_float32 else dtype
            self._rope = RotaryTable(config, angles, device)
            self._table = self._rope.halves()

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """cuBLAS', by a measured algorithm where there are several."""
        return (
            linear(weight, bias) if self._products is None else self._products.linear(weight, bias)
        )

    def gate_up(self, gate: Tensor, up: Tensor) -> GateUp[Tensor]:
        """One product of both weights, then one kernel."""
        if gate.shape[0] * gate.element_size() % _VECTOR_BYTES:
            return self._torch.gate_up(gate, up)
        product, silu_and_mul = self.product(torch.cat((gate, up))), self._silu_and_mul
        return lambda x: silu_and_mul(product(x))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm, times the weight before it is rounded."""
        return self._library.rmsnorm(x, weight, self._norm_eps)

    def add_norm(
        self,
        product: Linear,
        inputs: Tensor,
        x: Tensor,
        weight: Tensor,
        *,
        is_final: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The product, then sum and norm in one kernel: x and the product are overwritten."""
        added = product(inputs)
        self._library.fused_add_rmsnorm(added, x, weight, self._norm_eps)
        return x, added

    def rotation(self, positions: Tensor) -> Rotation:
        """A table on the device and the positions in it."""
        if not self._is_rotation_fused:
            return self._torch.rotation(positions)
        return FusedRotation(self._library, self._table, positions, self._rotate_and_keep)

    def reserve(self, num_positions: int) -> None:
        """Make sure that positions below ``num_positions`` are in the table."""
        if not self._is_rotation_fused:
            self._torch.reserve(num_positions)
        elif num_positions > self._rope.num_positions:
            self._rope.reserve(num_positions)
            self._table = self._rope.halves()

    def choose(self, num_rows: int, measure: Stopwatch) -> dict[str, str]:
        """Among cuBLASLt's algorithms, shape by shape."""
        return {} if self._products is None else self._products.choose(num_rows, measure)

    def chosen(self) -> AbstractContextManager[None]:
        """See ``MeasuredProducts.chosen``."""
        return nullcontext() if self._products is None else self._products.chosen()


def flashinfer_operators(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> FlashInferOperators:
    """The operators on the installed library, Triton's kernels among them compiled.

    Raises:
        ConfigurationError: it is not installed, or cannot run there.
    """
    library = load_flashinfer(device, dtype)
    try:
        from sangam_worker.models.gate_triton import silu_and_mul
        from sangam_worker.models.rotation_triton import rotate_and_keep
    except ImportError as error:
        raise ConfigurationError(
            f"operators 'flashinfer' need Triton, which cannot be imported ({error}); "
            + HOW_TO_INSTALL
        ) from None
    products = measured_products(device)
    operators = FlashInferOperators(
        config, dtype, device, library, silu_and_mul, rotate_and_keep, products
    )
    with first_use("the kernels of rotation and gate"):
        silu_and_mul(torch.zeros((1, 2 * config.mlp_size), dtype=dtype, device=device))
        _keep_once(operators, config, dtype, device)
    return operators


def measured_products(device: torch.device) -> MeasuredProducts | None:
    """``None`` where cuBLASLt cannot be asked: torch's products do as well, if not as fast."""
    try:
        library = load_cublaslt(device)
    except Exception as error:  # noqa: BLE001 - the bindings' own, of whatever class
        log.warning("products are as cuBLAS picks them", error=str(error)[:300])
        return None
    return None if library is None else MeasuredProducts(library)


def _keep_once(
    operators: FlashInferOperators, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """A row on a page, in the model's shape: Triton compiles on first use."""
    rotation = operators.rotation(torch.zeros(1, dtype=torch.int64, device=device))
    if isinstance(rotation, KeepingRotation):
        kv_heads, head_dim = config.num_kv_heads, config.head_dim
        qkv = torch.zeros(1, config.num_heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
        pages = qkv.new_zeros(1, 2, PAGE_TOKENS, kv_heads, head_dim)
        rotation.keep(qkv, pages, torch.zeros(1, dtype=torch.int32, device=device))
