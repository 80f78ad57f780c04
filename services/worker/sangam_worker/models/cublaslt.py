"""Matrix products by cuBLASLt, by an algorithm of the caller's choice, through NVIDIA's bindings.

``torch.mm`` takes the algorithm that cuBLAS thinks is the best for a shape; cuBLASLt names further
ones. Decides how a product of rows and a weight as torch keeps them (both row by row) is told to a
library that counts by columns: ``out.T = weight @ x.T``. Which algorithm is taken is
``measured_products``' business. ``nvmath-python`` (1.0) comes with extra ``gpu``; without it
products are torch's.
"""

import ctypes
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_ALGORITHMS = 6
"""That are asked for: cuBLASLt tells the most promising first."""

WORKSPACE_BYTES = 32 * 2**20
"""What torch, too, gives cuBLAS on Hopper. For all products, which run one after the other."""

_BFLOAT16, _FLOAT32 = 14, 0
"""cudaDataType_t."""

_COMPUTE_FLOAT32 = 68
"""cublasComputeType_t: sums are kept in float32."""

_TRANSPOSED = 1
"""cublasOperation_t."""

_IN_COMPUTE_TYPE = 2
"""cublasLtReductionScheme_t: parts of a sum are kept, and added up, in float32. The other schemes
round each of them to bfloat16."""

_SUCCESS = 0
"""cublasStatus_t."""


class Shape(NamedTuple):
    """Of a product: ``[num_rows, num_inputs] @ [num_outputs, num_inputs].T``, and a bias or not."""

    num_rows: int
    num_inputs: int
    num_outputs: int
    has_bias: bool


class _Plan(NamedTuple):
    """A shape in cuBLASLt's terms.

    Attributes:
        found: its results, contiguous.
    """

    description: int
    weight: int
    rows: int
    out: int
    found: np.ndarray


class CublasLt:
    """Products in bfloat16 on one device.

    Args:
        bindings: ``nvmath.bindings.cublasLt``, or a fake of it.
    """

    def __init__(self, bindings: Any, device: torch.device) -> None:
        self._bindings, self._device = bindings, device
        self._handle = bindings.create()
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._plans: dict[Shape, _Plan] = {}

    def num_algorithms(self, shape: Shape) -> int:
        """How many there are to choose from; they are numbered from 0."""
        return len(self._plan(shape).found)

    def product(self, algorithm: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``, rounded once.

        Args:
            algorithm: see ``num_algorithms``. x: ``[rows, in]``, contiguous. weight: ``[out, in]``,
                contiguous.
        """
        bindings = self._bindings
        plan = self._plan(Shape(len(x), x.shape[1], len(weight), bias is not None))
        assert x.is_contiguous()
        assert weight.is_contiguous()
        if bias is not None:
            self._describe(plan.description, "BIAS_POINTER", bias.data_ptr())
        out = x.new_empty(len(x), len(weight))
        chosen = plan.found[algorithm : algorithm + 1]["algo"]
        bindings.matmul(
            self._handle,
            plan.description,
            ctypes.addressof(self._one),
            weight.data_ptr(),
            plan.weight,
            x.data_ptr(),
            plan.rows,
            ctypes.addressof(self._zero),
            out.data_ptr(),
            plan.out,
            out.data_ptr(),
            plan.out,
            chosen.ctypes.data,
            self._workspace.data_ptr(),
            WORKSPACE_BYTES,
            _stream(self._device),
        )
        return out

    def _plan(self, shape: Shape) -> _Plan:
        if shape not in self._plans:
            self._plans[shape] = self._made(shape)
        return self._plans[shape]

    def _made(self, shape: Shape) -> _Plan:
        bindings = self._bindings
        description = bindings.matmul_desc_create(_COMPUTE_FLOAT32, _FLOAT32)
        self._describe(description, "TRANSA", _TRANSPOSED)
        if shape.has_bias:
            self._describe(description, "EPILOGUE", bindings.Epilogue.BIAS)
        num_rows, num_inputs, num_outputs, _ = shape
        weight, rows, out = (
            bindings.matrix_layout_create(_BFLOAT16, height, width, height)
            for height, width in (
                (num_inputs, num_outputs),
                (num_inputs, num_rows),
                (num_outputs, num_rows),
            )
        )
        preference = self._preference()
        found = np.zeros(MOST_ALGORITHMS, dtype=bindings.matmul_heuristic_result_dtype)
        number = np.zeros(1, dtype=np.int32)
        bindings.matmul_algo_get_heuristic(
            self._handle,
            description,
            weight,
            rows,
            out,
            out,
            preference,
            len(found),
            found.ctypes.data,
            number.ctypes.data,
        )
        bindings.matmul_preference_destroy(preference)
        found = found[: int(number[0])]
        return _Plan(description, weight, rows, out, found[found["state"] == _SUCCESS])

    def _preference(self) -> int:
        """What algorithms may need and do."""
        bindings = self._bindings
        preference: int = bindings.matmul_preference_create()
        names = bindings.MatmulPreferenceAttribute
        for name, value in (
            (names.MAX_WORKSPACE_BYTES, np.array(WORKSPACE_BYTES, dtype=np.uint64)),
            (names.REDUCTION_SCHEME_MASK, np.array(_IN_COMPUTE_TYPE, dtype=np.uint32)),
        ):
            bindings.matmul_preference_set_attribute(
                preference, name, value.ctypes.data, value.nbytes
            )
        return preference

    def _describe(self, description: int, name: str, value: int) -> None:
        attribute = self._bindings.MatmulDescAttribute[name]
        dtype = self._bindings.get_matmul_desc_attribute_dtype(attribute)
        number = np.array(value, dtype=dtype)
        self._bindings.matmul_desc_set_attribute(
            description, attribute, number.ctypes.data, number.nbytes
        )


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def load_cublaslt(device: torch.device) -> CublasLt | None:
    """The installed library, ``None`` where the bindings are not.

    Raises:
        Exception: the bindings', where they find no cuBLASLt, or not what they need themselves.
    """
    try:
        bindings = import_module("nvmath.bindings.cublasLt")
    except ModuleNotFoundError as error:
        if error.name != "nvmath":
            raise
        return None
    with torch.cuda.device(device):
        return CublasLt(bindings, device)
