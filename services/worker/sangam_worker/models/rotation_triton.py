"""Rotation and the keeping of K and V on CUDA: one short Triton kernel in place of two.

FlashInfer rotates queries and keys where they lie, and its append reads the keys back from there:
here they go to their page at once, which saves a sixth of the bytes and a launch a layer. A
program has a few heads of one row and reads the row's angles once for all of them. Imported by
``flashinfer_operators`` for CUDA devices only: nothing else needs Triton.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_HEADS = 8
"""Of a program: with heads of 128 a thread of two warps has 8 entries of each half."""

ENTRIES_A_THREAD = 8
"""Of each half of a head: one load of 16 bytes in bf16."""


def rotate_and_keep(
    qkv: Tensor, positions: Tensor, table: Tensor, pages: Tensor, slots: Tensor
) -> None:
    """Rotate the queries in place; put keys, rotated, and values on their pages.

    Args:
        qkv: ``[rows, heads + 2 * kv_heads, head_dim]``, contiguous; its keys and values stay as
            they are. Rows behind the slots are left alone.
        positions: ``[rows]``, in the table. table: float32 ``[positions, head_dim]``, cos then sin.
        pages: of a layer, ``(pages, 2, 16, kv_heads, head_dim)``, contiguous.
        slots: ``page * 16 + slot``, int32 ``[rows that are kept]``.
    """
    _, _, page_tokens, num_kv_heads, head_dim = pages.shape
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    num_rows, heads = len(slots), heads_of_program(num_heads, num_kv_heads)
    assert qkv.is_contiguous()
    assert pages.is_contiguous()
    with torch.cuda.device(qkv.get_device()):  # Triton launches on the current one
        rotate_and_append_rows[num_rows, qkv.shape[1] // heads](
            qkv,
            positions,
            table,
            pages,
            slots,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            half=head_dim // 2,
            page_tokens=page_tokens,
            heads=heads,
            num_warps=num_warps(heads, head_dim),
        )


def heads_of_program(num_heads: int, num_kv_heads: int) -> int:
    """A power of 2 that divides both numbers: a program's heads are all of a kind."""
    return math.gcd(num_heads, num_kv_heads, MOST_HEADS)


def num_warps(heads: int, head_dim: int) -> int:
    """Warps of a program."""
    return max(1, heads * head_dim // 2 // (32 * ENTRIES_A_THREAD))


# Index arrays lie anywhere in an iteration's one upload: not a kernel for every alignment, which
# would be compiled inside a request.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])  # type: ignore[untyped-decorator]
def rotate_and_append_rows(
    qkv: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    page_tokens: tl.constexpr,
    heads: tl.constexpr,
) -> None:
    """Some heads of a row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * heads
    lanes = tl.arange(0, half)[None, :]
    at = tl.arange(0, heads)[:, None] * (2 * half) + lanes
    fed = qkv + (row * (num_heads + 2 * num_kv_heads) + first) * (2 * half) + at
    one, other = tl.load(fed), tl.load(fed + half)
    slot = tl.load(slots + row).to(tl.int64)
    token = num_kv_heads * (2 * half)
    # K of a page, then V.
    page = slot // page_tokens * (2 * page_tokens) + slot % page_tokens
    keys = pages + page * token + (first - num_heads) * (2 * half) + at
    if first >= num_heads + num_kv_heads:
        values = keys + (page_tokens - 1) * token
        tl.store(values, one)
        tl.store(values + half, other)
    else:
        # Once for each head: the threads that need an angle load it, from the nearest cache.
        wide = tl.zeros((heads, half), tl.int32) + lanes
        angles = table + tl.load(positions + row).to(tl.int64) * (2 * half) + wide
        cos, sin = tl.load(angles), tl.load(angles + half)
        x, y = one.to(tl.float32), other.to(tl.float32)
        turned = (x * cos - y * sin).to(qkv.dtype.element_ty)
        turned_other = (y * cos + x * sin).to(qkv.dtype.element_ty)
        if first >= num_heads:
            tl.store(keys, turned)
            tl.store(keys + half, turned_other)
        else:
            tl.store(fed, turned)
            tl.store(fed + half, turned_other)
