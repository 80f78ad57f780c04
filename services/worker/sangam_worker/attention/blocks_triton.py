"""Attention of decode blocks over pages on CUDA: a Triton kernel for a batch of one shape.

A block's queries are few (32) and its keys many, so that what counts is to read K and V as fast as
memory gives them. FlashInfer's kernels have tiles of 64 or 128 queries, half or three quarters of
them empty where heads share nothing; here a tile has as many queries as there are, and the next
keys are on their way while these are multiplied. There is no plan: sequences' lengths and pages
are read on the device, so that a graph needs nothing from the host but those arrays. Where a batch
has too few tiles for the device, keys are split, and a second kernel puts the parts together
(Flash-Decoding). Imported by ``flashinfer_backend`` for CUDA devices only: nothing else needs
Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sangam_worker.attention.blocks import Tiling, num_query_tiles, partial_shapes
from sangam_worker.attention.protocol import FixedBatch

_LOG2_E = 1.4426950408889634

_HEADS_AT_ONCE = 4
"""Of a row, that a program puts together."""


def attend_blocks(
    q: Tensor, pages: Tensor, batch: FixedBatch, tiling: Tiling, workspace: Tensor, answers: Tensor
) -> None:
    """Every block's rows attend to their sequence's positions; no mask, scale 1/sqrt(head_dim).

    Args:
        q: ``[rows, heads, head_dim]``, heads behind each other; rows may be farther apart.
        pages: of a layer, ``(pages, 2, 16, kv_heads, head_dim)``, contiguous.
        batch: where lengths and page tables lie. tiling: see there.
        workspace: uint8, for parts of split keys (``partial_shapes``).
        answers: ``[rows, heads, head_dim or more]``, contiguous, written over but for sequences
            that only fill up the batch: those have no length, and keep what is there.
    """
    _, _, page_tokens, num_kv_heads, head_dim = pages.shape
    num_rows, num_heads, _ = q.shape
    assert q.stride()[1:] == (head_dim, 1)
    assert pages.is_contiguous()
    assert answers.is_contiguous()
    partial, sums = _cut(workspace, partial_shapes(num_rows, num_heads, head_dim, tiling))
    sizes = {
        "rows": batch.rows_per_sequence,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "answer_dim": answers.shape[2],
    }
    tiles = num_query_tiles(num_heads // num_kv_heads, batch.rows_per_sequence, tiling)
    with torch.cuda.device(q.get_device()):  # Triton launches on the current one
        attend_tile[num_kv_heads * tiles, tiling.num_splits, batch.num_sequences](
            q,
            pages,
            batch.kv_lengths,
            batch.page_indptr,
            batch.page_indices,
            answers,
            partial,
            sums,
            q.stride(0),
            tiling.num_splits,
            scale=head_dim**-0.5 * _LOG2_E,
            num_kv_heads=num_kv_heads,
            page_tokens=page_tokens,
            num_queries=tiling.num_queries,
            num_keys=tiling.num_keys,
            is_split=tiling.num_splits > 1,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            **sizes,
        )
        if tiling.num_splits > 1:
            put_together[num_rows, triton.cdiv(num_heads, _HEADS_AT_ONCE)](
                partial,
                sums,
                batch.kv_lengths,
                answers,
                tiling.num_splits,
                heads=_HEADS_AT_ONCE,
                num_warps=_HEADS_AT_ONCE,
                **sizes,
            )


def _cut(workspace: Tensor, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Tensor]:
    tensors, stop = [], 0
    for shape in shapes:
        start, stop = stop, stop + 4 * torch.Size(shape).numel()
        tensors.append(workspace[start:stop].view(torch.float32).view(shape))
    return tensors


# Index arrays lie anywhere in an iteration's one upload, and splits are as many as a batch needs:
# not a kernel for each of them.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["kv_lengths", "page_indptr", "page_indices"],
)
def attend_tile(
    queries: tl.tensor,
    pages: tl.tensor,
    kv_lengths: tl.tensor,
    page_indptr: tl.tensor,
    page_indices: tl.tensor,
    answers: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    query_stride: tl.tensor,
    num_splits: tl.tensor,
    scale: tl.constexpr,
    rows: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    answer_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    num_queries: tl.constexpr,
    num_keys: tl.constexpr,
    is_split: tl.constexpr,
) -> None:
    """Some queries of the heads that share one head of K and V, over a stretch of keys."""
    sequence = tl.program_id(2)
    length = tl.load(kv_lengths + sequence)
    if length == 0:
        return
    group: tl.constexpr = num_heads // num_kv_heads
    num_tiles: tl.constexpr = (group * rows + num_queries - 1) // num_queries
    token: tl.constexpr = num_kv_heads * head_dim
    kv_head = tl.program_id(0) // num_tiles
    split = tl.program_id(1)
    stretch = tl.cdiv(tl.cdiv(length, num_keys), num_splits) * num_keys
    first = split * stretch
    last = tl.minimum(first + stretch, length)
    # Queries of a tile: all rows of one head, then of the next.
    query = tl.program_id(0) % num_tiles * num_queries + tl.arange(0, num_queries)
    is_query = query < group * rows
    row = sequence.to(tl.int64) * rows + query % rows
    head = kv_head * group + query // rows
    lanes = tl.arange(0, head_dim)
    at = (row * query_stride + head * head_dim)[:, None] + lanes[None, :]
    q = tl.load(queries + at, mask=is_query[:, None], other=0.0)

    table = page_indices + tl.load(page_indptr + sequence)
    side = pages + kv_head * head_dim
    largest = tl.full((num_queries,), float("-inf"), tl.float32)
    total = tl.zeros((num_queries,), tl.float32)
    mixed = tl.zeros((num_queries, head_dim), tl.float32)
    keys = tl.arange(0, num_keys)
    page = tl.load(table + (first + keys) // page_tokens, mask=first + keys < last, other=0)
    for start in range(first, last, num_keys):
        key = start + keys
        is_key = key < last
        slot = (page.to(tl.int64) * (2 * page_tokens) + key % page_tokens) * token
        # Page numbers are read one step ahead: keys need not wait for them, and can themselves be
        # under way for as many steps as there are stages.
        further = key + num_keys
        page = tl.load(table + further // page_tokens, mask=further < last, other=0)
        k = tl.load(side + slot[None, :] + lanes[:, None], mask=is_key[None, :], other=0.0)
        scores = tl.where(is_key[None, :], tl.dot(q, k) * scale, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights, shrunk = tl.exp2(scores - larger[:, None]), tl.exp2(largest - larger)
        values = side + page_tokens * token + slot[:, None] + lanes[None, :]
        v = tl.load(values, mask=is_key[:, None], other=0.0)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrunk[:, None])
        total = total * shrunk + tl.sum(weights, 1)
        largest = larger

    place = row * num_heads + head
    if is_split:
        place += split.to(tl.int64) * tl.num_programs(2) * rows * num_heads
        # Nothing was seen where a sequence is too short for all splits: no part of the answer.
        seen = tl.where(total > 0, total, 1.0)
        at = (place * head_dim)[:, None] + lanes[None, :]
        tl.store(partial + at, mixed / seen[:, None], mask=is_query[:, None])
        tl.store(sums + place, largest + tl.log2(seen), mask=is_query)
    else:
        at = (place * answer_dim)[:, None] + lanes[None, :]
        answer = (mixed / total[:, None]).to(answers.dtype.element_ty)
        tl.store(answers + at, answer, mask=is_query[:, None])


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["kv_lengths"]
)
def put_together(
    partial: tl.tensor,
    sums: tl.tensor,
    kv_lengths: tl.tensor,
    answers: tl.tensor,
    num_splits: tl.tensor,
    rows: tl.constexpr,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    answer_dim: tl.constexpr,
    heads: tl.constexpr,
) -> None:
    """Some heads of a row: the mean of the parts, weighted by what each has seen."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(kv_lengths + row // rows) == 0:
        return
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    is_head = head < num_heads
    lanes = tl.arange(0, head_dim)
    largest = tl.full((heads,), float("-inf"), tl.float32)
    total = tl.zeros((heads,), tl.float32)
    mixed = tl.zeros((heads, head_dim), tl.float32)
    for split in range(num_splits):
        place = (split * tl.num_programs(0) + row) * num_heads + head
        # The first part has seen something: no weight is taken of nothing against nothing.
        seen = tl.load(sums + place, mask=is_head, other=0.0)
        at = (place * head_dim)[:, None] + lanes[None, :]
        part = tl.load(partial + at, mask=is_head[:, None], other=0.0)
        larger = tl.maximum(largest, seen)
        weight, shrunk = tl.exp2(seen - larger), tl.exp2(largest - larger)
        mixed = mixed * shrunk[:, None] + part * weight[:, None]
        total = total * shrunk + weight
        largest = larger
    at = ((row * num_heads + head) * answer_dim)[:, None] + lanes[None, :]
    answer = (mixed / total[:, None]).to(answers.dtype.element_ty)
    tl.store(answers + at, answer, mask=is_head[:, None])
