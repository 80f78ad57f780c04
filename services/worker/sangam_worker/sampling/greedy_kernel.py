"""A Triton kernel that reads each row of logits once and says what a greedy draw needs of it.

One program a row, which walks the vocabulary in chunks with an online softmax (Milakov and
Gimelshein 2018): where a chunk has a new best, a few times a row, it is looked for and the sums so
far are rescaled; all else is one exponential and one addition an entry. Knows nothing of families,
rules or the dtype of confidences. Imported by ``greedy`` for CUDA devices only: nothing else needs
Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK_ENTRIES = 4096
NUM_WARPS = 8
"""16 entries a thread and chunk: two loads of 16 bytes in bf16, and nothing spills on sm_90."""

CHUNKS_IN_FLIGHT = 3


def summarise(logits: Tensor, mask_id: int, num_columns: int) -> Tensor:
    """What ``greedy.GreedyKernel`` promises, for ``[rows, vocab]`` of any strides.

    Exponentials and sums over entries are float32; only what is left per row is float64. The sum
    leaves out the best entry's own 1, so that confidences close to 1 are as far apart as they are.
    """
    num_rows, vocab_size = logits.shape
    summary = torch.empty((num_rows, num_columns), dtype=torch.float64, device=logits.device)
    with torch.cuda.device(logits.get_device()):  # Triton launches on the current one
        read_row[(num_rows,)](
            logits,
            logits.stride(0),
            logits.stride(1),
            vocab_size,
            mask_id,
            summary,
            num_columns=num_columns,
            chunk_entries=CHUNK_ENTRIES,
            chunks_in_flight=CHUNKS_IN_FLIGHT,
            num_warps=NUM_WARPS,
        )
    return summary


@triton.jit(do_not_specialize=["mask_id"])  # type: ignore[untyped-decorator]
def read_row(
    logits: tl.tensor,
    row_stride: tl.tensor,
    entry_stride: tl.tensor,
    vocab_size: tl.tensor,
    mask_id: tl.tensor,
    summary: tl.tensor,
    num_columns: tl.constexpr,
    chunk_entries: tl.constexpr,
    chunks_in_flight: tl.constexpr,
) -> None:
    """One program's row: ``summary[row, :num_columns]``, float64, contiguous."""
    row = tl.program_id(0).to(tl.int64)
    entries = logits + row * row_stride
    lanes = tl.arange(0, chunk_entries)
    # The best candidate so far and its id. Sums over the other entries, e being exp(x - top): of e
    # and of e * (x - top), per lane; apart from those the same of what was once the best.
    top = float("-inf")
    token = vocab_size
    others = tl.zeros((chunk_entries,), tl.float32)
    weighted = tl.zeros((chunk_entries,), tl.float32)
    former = 0.0
    former_weighted = 0.0
    runner_up = float("-inf")
    for start in tl.range(0, vocab_size, chunk_entries, num_stages=chunks_in_flight):
        ids = start + lanes
        x = tl.load(entries + ids.to(tl.int64) * entry_stride, ids < vocab_size, float("-inf"))
        # Left out here and not in the load, which would then go entry by entry.
        x = tl.where(ids == mask_id, float("-inf"), x.to(tl.float32))
        chunk_top = tl.max(x, 0)
        if chunk_top > top:
            scale = tl.exp(top - chunk_top)
            if num_columns > 2:
                shift = tl.where(top == float("-inf"), 0.0, top - chunk_top)
                weighted = scale * (weighted + shift * others)
                former_weighted = scale * (former_weighted + shift * (former + 1))
            others *= scale
            former = scale * (former + 1)
            token = tl.min(tl.where(x == chunk_top, ids, vocab_size), 0)
            x = tl.where(ids == token, float("-inf"), x)
            if num_columns > 2:
                runner_up = tl.maximum(top, tl.max(x, 0))
            top = chunk_top
        elif num_columns > 2:
            runner_up = tl.maximum(runner_up, chunk_top)
        # A NaN gets into the sums here, and from them into every figure of the row.
        below = x - tl.where(top == float("-inf"), 0.0, top)
        e = tl.exp(below)
        others += e
        if num_columns > 2:
            weighted += e * tl.where(x == float("-inf"), 0.0, below)

    # The mask token is no candidate but keeps its share. ``peak``: the best with it included.
    mask = tl.load(entries + mask_id.to(tl.int64) * entry_stride).to(tl.float32)
    peak = tl.maximum(top, mask)
    own = tl.exp(top - peak).to(tl.float64)
    mask_mass = tl.exp(mask - peak).to(tl.float64)
    rest = (tl.sum(others, 0) + former).to(tl.float64)
    mass = own + own * rest + mask_mass
    # Where every candidate is at minus infinity: the lowest of them.
    token = tl.where(token < vocab_size, token, tl.where(mask_id == 0, 1, 0))
    columns = summary + row * num_columns
    tl.store(columns, token.to(tl.float64))
    tl.store(columns + 1, own / mass)
    if num_columns > 2:
        second = tl.exp(tl.maximum(runner_up, mask) - peak).to(tl.float64)
        tl.store(columns + 2, second / mass)
        # From below the best to below the peak; what has no mass has no distance either.
        top_below = tl.where(own > 0, (top - peak).to(tl.float64), 0.0)
        mask_below = tl.where(mask_mass > 0, (mask - peak).to(tl.float64), 0.0)
        total = (tl.sum(weighted, 0) + former_weighted).to(tl.float64) + top_below * (1 + rest)
        tl.store(columns + 3, (own * total + mask_mass * mask_below) / mass - tl.log(mass))
