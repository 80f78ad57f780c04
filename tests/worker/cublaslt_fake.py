"""cuBLASLt's bindings on a CPU: what NVIDIA's give and take, on the memory that pointers name.

Matrices lie by columns, as the library has them. What it refuses is refused; every call is bound
against the installed bindings' signatures, where they are installed.
"""

import ctypes
import functools
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

INSTALL = (
    "pip install --no-deps -c constraints-gpu.txt nvmath-python cuda-core cuda-bindings "
    "cuda-pathfinder"
)

# Of the library's headers.
BFLOAT16, FLOAT32, COMPUTE_FLOAT32, TRANSPOSED, WITH_BIAS = 14, 0, 68, 1, 4
IN_COMPUTE_TYPE, NOT_SUPPORTED = 2, 15


class MatmulDescAttribute(IntEnum):
    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8


class MatmulPreferenceAttribute(IntEnum):
    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3


class Epilogue(IntEnum):
    BIAS = WITH_BIAS


_DTYPES = {
    MatmulDescAttribute.TRANSA: np.int32,
    MatmulDescAttribute.TRANSB: np.int32,
    MatmulDescAttribute.EPILOGUE: np.uint32,
    MatmulDescAttribute.BIAS_POINTER: np.int64,
}


_PREFERENCE_DTYPES = {
    MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES: np.uint64,
    MatmulPreferenceAttribute.REDUCTION_SCHEME_MASK: np.uint32,
}


def is_installed() -> bool:
    """Whether calls can be bound."""
    names = ("nvmath", "cuda", "cuda.core", "cuda.bindings")
    return all(importlib.util.find_spec(name) is not None for name in names)


@functools.cache
def parameters_of(name: str) -> tuple[str, ...]:
    """Names of a binding's parameters, from its signature's text: it is a compiled function."""
    from nvmath.bindings import cublasLt  # here, since it is a GPU's

    text = (getattr(cublasLt, name).__doc__ or "").partition("\n")[0]
    listed = re.fullmatch(rf"{name}\((.*)\)( -> \w+)?", text)
    assert listed is not None, text
    return tuple(each.split()[-1] for each in listed[1].split(", ") if each)


@dataclass
class Description:
    """Of a product."""

    attributes: dict[MatmulDescAttribute, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """Of a matrix: ``width`` columns, ``stride`` entries apart."""

    height: int
    width: int
    stride: int

    def at(self, address: int) -> Tensor:
        """The matrix there, whose memory it shares."""
        assert address % 16 == 0
        size = 2 * self.stride * self.width
        memory = (ctypes.c_char * size).from_address(address)
        by_columns = torch.frombuffer(memory, dtype=torch.bfloat16).view(self.width, self.stride)
        return by_columns[:, : self.height].t()


class FakeCublasLt:
    """``nvmath.bindings.cublasLt``.

    Args:
        num_algorithms: that there are, for any shape. num_refused: the first of these are named,
            but not supported.
        issue: runs what the library would issue; a graph's fake records it.

    Attributes:
        calls: of functions, by name, in order. ran: algorithms that multiplied, by number, and how
            many rows.
    """

    MatmulDescAttribute = MatmulDescAttribute
    MatmulPreferenceAttribute = MatmulPreferenceAttribute
    Epilogue = Epilogue
    matmul_heuristic_result_dtype = np.dtype(
        [
            ("algo", [("data_", "<u8", (8,))]),
            ("workspace_size", "<u8"),
            ("state", "<i4"),
            ("waves_count", "<f4"),
            ("reserved", "<i4", (4,)),
        ]
    )

    def __init__(
        self,
        num_algorithms: int = 3,
        issue: Callable[..., Any] = lambda run, *args: run(*args),
        num_refused: int = 0,
    ) -> None:
        self.num_algorithms, self.num_refused, self._issue = num_algorithms, num_refused, issue
        self.calls: list[str] = []
        self.ran: list[tuple[int, int]] = []
        self._made: dict[int, Any] = {}

    def _called(self, name: str, *arguments: object) -> None:
        self.calls.append(name)
        if is_installed():
            assert len(parameters_of(name)) == len(arguments), name

    def _new(self, thing: Any) -> int:
        number = 1000 + len(self._made)
        self._made[number] = thing
        return number

    def create(self) -> int:
        self._called("create")
        return self._new("handle")

    def matmul_desc_create(self, compute_type: int, scale_type: int) -> int:
        self._called("matmul_desc_create", compute_type, scale_type)
        assert (compute_type, scale_type) == (COMPUTE_FLOAT32, FLOAT32)
        return self._new(Description())

    def get_matmul_desc_attribute_dtype(self, attribute: int) -> type[np.generic]:
        self._called("get_matmul_desc_attribute_dtype", attribute)
        return _DTYPES[MatmulDescAttribute(attribute)]

    def matmul_desc_set_attribute(
        self, description: int, attribute: int, buffer: int, size: int
    ) -> None:
        self._called("matmul_desc_set_attribute", description, attribute, buffer, size)
        name = MatmulDescAttribute(attribute)
        assert size == np.dtype(_DTYPES[name]).itemsize
        self._made[description].attributes[name] = _read(buffer, _DTYPES[name])

    def matrix_layout_create(self, kind: int, rows: int, columns: int, stride: int) -> int:
        self._called("matrix_layout_create", kind, rows, columns, stride)
        assert kind == BFLOAT16
        assert stride >= rows
        return self._new(Layout(rows, columns, stride))

    def matmul_preference_create(self) -> int:
        self._called("matmul_preference_create")
        return self._new({})

    def matmul_preference_set_attribute(
        self, preference: int, attribute: int, buffer: int, size: int
    ) -> None:
        self._called("matmul_preference_set_attribute", preference, attribute, buffer, size)
        name = MatmulPreferenceAttribute(attribute)
        assert size == np.dtype(_PREFERENCE_DTYPES[name]).itemsize
        self._made[preference][name] = _read(buffer, _PREFERENCE_DTYPES[name])

    def matmul_preference_destroy(self, preference: int) -> None:
        self._called("matmul_preference_destroy", preference)
        del self._made[preference]

    def matmul_algo_get_heuristic(
        self,
        handle: int,
        description: int,
        a: int,
        b: int,
        c: int,
        d: int,
        preference: int,
        requested: int,
        results: int,
        number: int,
    ) -> None:
        arguments = (handle, description, a, b, c, d, preference, requested, results, number)
        self._called("matmul_algo_get_heuristic", *arguments)
        self._check(handle, description, a, b, c, d)
        wanted = self._made[preference]
        self._workspace_bytes = wanted[MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES]
        assert wanted[MatmulPreferenceAttribute.REDUCTION_SCHEME_MASK] == IN_COMPUTE_TYPE
        count = min(requested, self.num_algorithms)
        size = self.matmul_heuristic_result_dtype.itemsize
        memory = (ctypes.c_char * (size * requested)).from_address(results)
        found = np.frombuffer(memory, dtype=self.matmul_heuristic_result_dtype)
        found["algo"]["data_"][:count, 0] = np.arange(count) + 70
        found["state"][: min(count, self.num_refused)] = NOT_SUPPORTED
        ctypes.c_int32.from_address(number).value = count

    def matmul(
        self,
        handle: int,
        description: int,
        alpha: int,
        a: int,
        a_layout: int,
        b: int,
        b_layout: int,
        beta: int,
        c: int,
        c_layout: int,
        d: int,
        d_layout: int,
        algorithm: int,
        workspace: int,
        workspace_bytes: int,
        stream: int,
    ) -> None:
        self._called(
            "matmul", handle, description, alpha, a, a_layout, b, b_layout, beta,
            c, c_layout, d, d_layout, algorithm, workspace, workspace_bytes, stream,
        )  # fmt: skip
        self._check(handle, description, a_layout, b_layout, c_layout, d_layout)
        assert ctypes.c_float.from_address(alpha).value == 1.0
        assert ctypes.c_float.from_address(beta).value == 0.0
        assert workspace_bytes >= self._workspace_bytes > 0
        ctypes.memset(workspace + workspace_bytes - 1, 255, 1)  # as an algorithm may
        places = [(self._made[a_layout], a), (self._made[b_layout], b), (self._made[d_layout], d)]
        attributes = self._made[description].attributes
        if attributes.get(MatmulDescAttribute.EPILOGUE) == WITH_BIAS:
            height = self._made[d_layout].height
            bias = attributes[MatmulDescAttribute.BIAS_POINTER]
            places.append((Layout(height, 1, height), bias))
        number = ctypes.c_uint64.from_address(algorithm).value - 70
        self.ran.append((number, self._made[b_layout].width))
        self._issue(_multiply, *places)

    def _check(self, handle: int, description: int, a: int, b: int, c: int, d: int) -> None:
        assert self._made[handle] == "handle"
        attributes = self._made[description].attributes
        assert attributes[MatmulDescAttribute.TRANSA] == TRANSPOSED
        assert MatmulDescAttribute.TRANSB not in attributes
        left, right, out = (self._made[each] for each in (a, b, d))
        assert c == d
        assert left.height == right.height
        assert (left.width, right.width) == (out.height, out.width)


def _multiply(*places: tuple[Layout, int]) -> None:
    left, right, out, *bias = [layout.at(address) for layout, address in places]
    product = left.t().float() @ right.float()
    out.copy_(sum((each.float() for each in bias), product))


def _read(address: int, dtype: type[np.generic]) -> int:
    memory = (ctypes.c_char * np.dtype(dtype).itemsize).from_address(address)
    return int(np.frombuffer(memory, dtype=dtype)[0])
