"""FP8 on CUDA: short Triton kernels that round rows, and cuBLAS' products of them.

One program a row, which holds the row in registers: read once, its largest entry found, written.
The three others are the same with what comes before a product fused in, so that FP8 adds one launch
a layer (behind attention) to what bf16 needs. The order of operations is ``fp8_torch``'s. Imported
by ``fp8_operators`` for CUDA devices only: nothing else needs Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sangam_worker.models.fp8 import LARGEST, SMALLEST, Fp8Rows

ENTRIES_A_WARP = 512
"""16 entries a thread: two loads of 16 bytes in bf16, and a row of 4,096 is read by 8 warps."""

MOST_WARPS = 16
"""Of which two programs fit on a multiprocessor at the widest rows, so that one loads while the
other looks for its largest entry."""

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST)


class TritonFp8Kernels:
    """``Fp8Kernels`` of ``fp8_operators``, for contiguous rows."""

    def product(self, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> "ScaledProduct":
        """cuBLAS'."""
        return ScaledProduct(weight, bias, dtype)

    def quantise(self, x: Tensor) -> Fp8Rows:
        """The rows as they are."""
        x = x.contiguous()
        rows = Fp8Rows.empty(x.shape, x.device)
        _launch(quantise_row, rows, x)
        return rows

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
        """RMS norm, not rounded before the weight."""
        rows = Fp8Rows.empty(x.shape, x.device)
        _launch(norm_row, rows, x, weight, eps)
        return rows

    def add_norm(self, added: Tensor, x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
        """Sum, in x's memory, and norm."""
        rows = Fp8Rows.empty(x.shape, x.device)
        _launch(add_norm_row, rows, x, added, weight, eps)
        return rows

    def silu_mul(self, gate_up: Tensor) -> Fp8Rows:
        """The halves of each row."""
        num_rows, width = gate_up.shape
        rows = Fp8Rows.empty((num_rows, width // 2), gate_up.device)
        _launch(silu_mul_row, rows, gate_up)
        return rows


class ScaledProduct:
    """cuBLAS' product of e4m3 rows with a scale a row on both sides; widths multiples of 16.

    Sums are the tensor cores' own (``use_fast_accum``), which keep some 14 bits: little beside the
    4 bits of what is summed. Moving them to float32 on the way would take time in every product.
    """

    def __init__(self, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._values, self._scales = weight.values.t(), weight.scales.view(1, -1)
        self._bias, self._dtype = bias, dtype

    def __call__(self, rows: Fp8Rows) -> Tensor:
        """``[rows, in]`` to ``[rows, out]``."""
        return torch._scaled_mm(
            rows.values,
            self._values,
            scale_a=rows.scales,
            scale_b=self._scales,
            bias=self._bias,
            out_dtype=self._dtype,
            use_fast_accum=True,
        )


def num_lanes(width: int) -> int:
    """Entries that a program holds: a power of 2."""
    return int(triton.next_power_of_2(width))


def num_warps(width: int) -> int:
    """Warps of a program."""
    return max(1, min(MOST_WARPS, num_lanes(width) // ENTRIES_A_WARP))


def _launch(kernel: Any, rows: Fp8Rows, x: Tensor, *others: Tensor | float) -> None:
    """One program for each of ``rows``, which it writes."""
    num_rows, width = rows.values.shape
    assert x.is_contiguous()
    with torch.cuda.device(x.get_device()):  # Triton launches on the current one
        kernel[(num_rows,)](
            rows.values,
            rows.scales,
            x,
            *others,
            width=width,
            lanes=num_lanes(width),
            num_warps=num_warps(width),
        )


@triton.jit  # type: ignore[untyped-decorator]
def quantise_row(
    values: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    width: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """A row of ``x``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, lanes)
    entries = tl.load(x + row * width + at, at < width, 0.0).to(tl.float32)
    _store(values, scales, entries, 1.0, width, lanes)


@triton.jit  # type: ignore[untyped-decorator]
def norm_row(
    values: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """The norm of a row of ``x``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, lanes)
    entries = tl.load(x + row * width + at, at < width, 0.0).to(tl.float32)
    weights = tl.load(weight + at, at < width, 0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(entries * entries, 0) / width + eps)
    _store(values, scales, entries * weights, factor, width, lanes)


@triton.jit  # type: ignore[untyped-decorator]
def add_norm_row(
    values: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """The norm of a row of ``x + added``, which takes x's place."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, lanes)
    place = x + row * width + at
    entries = tl.load(place, at < width, 0.0).to(tl.float32)
    more = tl.load(added + row * width + at, at < width, 0.0).to(tl.float32)
    weights = tl.load(weight + at, at < width, 0.0).to(tl.float32)
    total = (entries + more).to(x.dtype.element_ty)
    tl.store(place, total, at < width)
    entries = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(entries * entries, 0) / width + eps)
    _store(values, scales, entries * weights, factor, width, lanes)


@triton.jit  # type: ignore[untyped-decorator]
def silu_mul_row(
    values: tl.tensor,
    scales: tl.tensor,
    gate_up: tl.tensor,
    width: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """SiLU of a row's first half times its second."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, lanes)
    halves = gate_up + row * (2 * width) + at
    gate = tl.load(halves, at < width, 0.0).to(tl.float32)
    up = tl.load(halves + width, at < width, 0.0).to(tl.float32)
    entries = gate / (1.0 + tl.exp(-gate)) * up
    _store(values, scales, entries, 1.0, width, lanes)


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    values: tl.tensor,
    scales: tl.tensor,
    entries: tl.tensor,
    factor: tl.tensor,
    width: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """Round a program's row; ``factor`` goes into its scale."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, lanes)
    # A maximum passes over NaNs, but as an entry each one stays.
    top = tl.maximum(tl.max(tl.abs(entries), 0), _SMALLEST)
    rounded = (entries * tl.div_rn(_LARGEST, top)).to(tl.float8e4nv)
    tl.store(values + row * width + at, rounded, at < width)
    tl.store(scales + row, tl.div_rn(top, _LARGEST) * factor)
