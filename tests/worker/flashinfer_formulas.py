"""What FlashInfer's kernels compute, by the formula, on a CPU.

Arguments are the real functions' by name, order and default (a test compares them). Refused is what
the library's C++ refuses (``CHECK_INPUT`` and the like), and what its kernels rely on and nobody
checks: index types, dtypes that are taken for others, vectors of 16 bytes, supported dimensions.
"""

import torch
from torch import Tensor

from sangam_worker.attention.blocks import Tiling, partial_shapes
from sangam_worker.attention.protocol import FixedBatch

HEAD_DIMS = (64, 128, 256)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    assert kv_layout == "NHD"
    page_size, num_heads, head_dim = paged_kv_cache.shape[2:]
    assert append_key.shape == append_value.shape == (len(positions), num_heads, head_dim)
    assert append_key.dtype == append_value.dtype == paged_kv_cache.dtype
    check_vectors(append_key, append_value, paged_kv_cache)
    assert head_dim in HEAD_DIMS
    assert num_heads * head_dim // max(8, head_dim // 32) <= 1024, "a thread block has every head"
    assert len(batch_indices) == len(positions)
    assert len(kv_indptr) == len(kv_last_page_len) + 1
    for each in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        check_indices(each)
    assert (
        (positions >= 0)
        & (positions < _lengths(kv_indptr, kv_last_page_len, page_size)[batch_indices.long()])
    ).all()
    iterations = kv_indptr[batch_indices.long()] * page_size + positions
    pages = kv_indices[(iterations // page_size).long()].long()
    slots = (iterations % page_size).long()
    paged_kv_cache[pages, 0, slots] = append_key
    paged_kv_cache[pages, 1, slots] = append_value


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:  # noqa: A002
    check_half(input, weight)
    assert input.dim() == 2
    assert weight.shape == input.shape[1:]
    return _normed(input.float(), weight, eps).to(input.dtype)


def fused_add_rmsnorm(
    input: Tensor,  # noqa: A002
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
) -> None:
    check_half(input, residual, weight)
    assert input.shape == residual.shape
    assert input.dim() == 2
    assert weight.shape == input.shape[1:]
    x = input.float() + residual.float()
    residual.copy_(x)
    input.copy_(_normed(x, weight, eps))


def silu_and_mul(input: Tensor) -> Tensor:  # noqa: A002
    check_half(input)
    assert input.is_contiguous(), "the kernel counts rows as if they were"
    half = input.shape[-1] // 2
    if input.shape[-1] * input.dtype.itemsize % 16:
        raise ValueError("The pointers must be multiple of 16 bytes.")
    assert half * input.dtype.itemsize % 16 == 0, "the second half's loads are misaligned"
    x, y = input[..., :half].float(), input[..., half:].float()
    return (x / (1 + (-x).exp()) * y).to(input.dtype)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    check_half(query, key)
    assert query.dim() == key.dim() == 3
    assert query.shape[0] == key.shape[0] == len(positions)
    assert query.shape[2] == key.shape[2] == head_size == cos_sin_cache.shape[1]
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    assert cos_sin_cache.is_contiguous()
    assert positions.is_contiguous()
    assert positions.dtype in (torch.int32, torch.int64)
    assert head_size in HEAD_DIMS, "another kernel, which we do not use"
    assert is_neox
    assert positions.min() >= 0
    assert positions.max() < len(cos_sin_cache)
    half = head_size // 2
    cos = cos_sin_cache[positions.long(), None, :half]
    sin = cos_sin_cache[positions.long(), None, half:]
    for x in (query, key):
        x = x.view(x.shape[0], -1, head_size)
        first, second = x[..., :half].float(), x[..., half:].float()
        x[..., :half] = first * cos - second * sin
        x[..., half:] = second * cos + first * sin


def rotate_and_keep(
    qkv: Tensor, positions: Tensor, table: Tensor, pages: Tensor, slots: Tensor
) -> None:
    """Not FlashInfer's: what ``rotation_triton`` does, by the two that it stands for."""
    assert qkv.is_contiguous()
    assert pages.is_contiguous()
    check_indices(slots)
    num_kv_heads, kept = pages.shape[3], qkv[: len(slots)].clone()
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    queries, keys = kept[:, :num_heads], kept[:, num_heads:-num_kv_heads]
    apply_rope_with_cos_sin_cache_inplace(
        positions[: len(slots)], queries, keys, qkv.shape[2], table
    )
    qkv[: len(slots), :num_heads] = queries
    number = torch.arange(len(pages), dtype=torch.int32)
    one_sequence = torch.tensor([0, len(pages)]).int(), torch.tensor([pages.shape[2]]).int()
    append_paged_kv_cache(
        keys, kept[:, -num_kv_heads:], torch.zeros_like(slots), slots, pages, number, *one_sequence
    )


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * ((x * x).mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (side.float().repeat_interleave(group, 1) for side in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).to(q.dtype)


def check_queries(q: Tensor, num_rows: int, out: Tensor | None) -> Tensor:
    if q.size(0) != num_rows:
        raise ValueError(f"q.shape[0] ({q.size(0)}) does not match qo_indptr[-1]")
    check_vectors(q)
    out = q.new_empty(q.shape) if out is None else out
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert out.is_contiguous(), "FA2 takes no strides of the result"
    check_vectors(out)
    return out


def check_half(*tensors: Tensor) -> None:
    """Of one dtype: kernels are chosen by the first one's, and read the others as the same."""
    for each in tensors:
        if each.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"no kernel for {each.dtype}")
        assert each.dtype == tensors[0].dtype
    check_vectors(*tensors)


def check_vectors(*tensors: Tensor) -> None:
    """Rows are read 16 bytes at a time, or by TMA, which asks the same of them."""
    for each in tensors:
        assert each.stride(-1) == 1 or each.shape[-1] == 1
        assert each.data_ptr() % 16 == 0
        apart = zip(each.shape[:-1], each.stride()[:-1], strict=True)
        assert all(stride * each.itemsize % 16 == 0 for size, stride in apart if size > 1)


def _lengths(indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    return (indptr.diff() - 1).clamp(min=0) * page_size + last_page_len


def check_indices(indices: Tensor) -> None:
    assert indices.dtype == torch.int32, "other types choose or break a kernel"
    assert indices.dim() == 1
    assert indices.is_contiguous()


def check_indptr(indptr: Tensor) -> None:
    assert indptr[0] == 0
    assert len(indptr) >= 2
    assert (indptr.diff() >= 0).all()


def check_heads(num_qo_heads: int, num_kv_heads: int, head_dim: int) -> None:
    assert num_qo_heads % num_kv_heads == 0
    assert head_dim in HEAD_DIMS


def attend_blocks(
    q: Tensor, pages: Tensor, batch: FixedBatch, tiling: Tiling, workspace: Tensor, answers: Tensor
) -> None:
    """What our own kernel computes for a graph, as it computes it: from the device's arrays."""
    num_heads, head_dim = q.shape[1:]
    needed = partial_shapes(len(q), num_heads, head_dim, tiling)
    assert 4 * sum(torch.Size(shape).numel() for shape in needed) <= len(workspace)
    for number in range(batch.num_sequences):
        length = int(batch.kv_lengths[number])
        if length == 0:
            continue
        first, num_pages = int(batch.page_indptr[number]), -(-length // pages.shape[2])
        own = pages[batch.page_indices[first : first + num_pages].long()]
        k, v = (side.flatten(0, 1)[:length] for side in own.unbind(1))
        start = number * batch.rows_per_sequence
        rows = slice(start, start + batch.rows_per_sequence)
        answers[rows, :, :head_dim] = attend(q[rows], k, v, head_dim**-0.5, causal=False)
