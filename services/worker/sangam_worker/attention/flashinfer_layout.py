"""FlashInfer's index arrays of one iteration, from the packed batch's layout.

Decides which sequences attend over pages and which over their own new rows, and which kernel
(FA2, FA3) an iteration gets. Host arrays only, so that a CPU checks it all. Called by
``flashinfer_backend`` and ``flashinfer_fixed``.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.layout import AttentionLayout, Int32s, Int64s

_LONG_ROWS = 128
"""Rows from which a sequence counts as a prefill for the choice of a kernel."""

_FEW_SHARED, _FEW = (3, 8), (2, sys.maxsize)
"""Blocks, at least and at most, that are FA3's: where heads share K/V, and where they do not."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedPart:
    """The sequences that attend over pages.

    Attributes:
        sequences: their numbers in the batch.
        kv_indptr, kv_indices, last_page_lengths: as FlashInfer has them, for these sequences.
    """

    sequences: Int64s
    kv_indptr: Int32s
    kv_indices: Int32s
    last_page_lengths: Int32s


def split(layout: AttentionLayout) -> tuple[PagedPart, Int64s]:
    """The sequences with pages, whole prefills among them, and the numbers of those without.

    A whole prefill is ragged in the layout, and its page table is in its write slots: its rows
    are kept before they are read, so that it shares one plan with the decodes.
    """
    bounds = np.searchsorted(layout.write_rows, layout.qo_indptr)
    if not layout.is_ragged.any():
        everything = np.arange(len(layout.kv_lengths))
        indptr, indices = layout.kv_page_indptr, layout.kv_page_indices
        return PagedPart(everything, indptr, indices, layout.kv_last_page_lengths), everything[:0]
    tables: list[Int32s] = []
    sequences: list[int] = []
    alone: list[int] = []
    for number, is_ragged in enumerate(layout.is_ragged.tolist()):
        first, last = bounds[number], bounds[number + 1]
        if not is_ragged:
            start, stop = layout.kv_page_indptr[number], layout.kv_page_indptr[number + 1]
            tables.append(layout.kv_page_indices[start:stop])
        elif first < last:
            slots = layout.write_slots[first:last:PAGE_TOKENS]
            tables.append((slots // PAGE_TOKENS).astype(np.int32))
        else:
            alone.append(number)
            continue
        sequences.append(number)
    paged = np.array(sequences, dtype=np.int64)
    return (
        PagedPart(
            sequences=paged,
            kv_indptr=indptr_of(np.array([len(table) for table in tables], dtype=np.int32)),
            kv_indices=np.concatenate([*tables, np.zeros(0, dtype=np.int32)]),
            last_page_lengths=(layout.kv_lengths[paged] - 1) % PAGE_TOKENS + 1,
        ),
        np.array(alone, dtype=np.int64),
    )


def indptr_of(lengths: Int32s) -> Int32s:
    """``[n + 1]`` bounds of ``n`` stretches behind each other."""
    return np.concatenate(([0], lengths)).cumsum(dtype=np.int32)


def rows_of(indptr: Int32s, sequences: Int64s) -> tuple[Int32s, Int64s | None]:
    """The chosen sequences' own bounds, and their rows in the batch; ``None`` for all of them."""
    lengths = np.diff(indptr)
    if len(sequences) == len(lengths):
        return indptr, None
    parts = [np.arange(indptr[each], indptr[each + 1]) for each in sequences.tolist()]
    return indptr_of(lengths[sequences]), np.concatenate([*parts, np.zeros(0, dtype=np.int64)])


def on_host(array: Int32s) -> Tensor:
    """The array where FlashInfer plans; it copies to the device itself."""
    return torch.from_numpy(array)


ChooseKernel = Callable[[AttentionLayout], str]
"""``fa2`` or ``fa3`` for an iteration."""


def measured_kernel(num_heads: int, num_kv_heads: int) -> ChooseKernel:
    """The faster one on an H200, where LLaDA-8B and Dream-7B were measured with both.

    With a prefill in the batch FA3 was 3 to 10 % faster in both models. FA3 gives each query head
    tiles of its own, so where heads share K/V (Dream) a block of 32 queries leaves them mostly
    empty: FA2 won by 6 % from 16 blocks on, FA3 at 4 and 8 blocks and a context of 1024 by 3 to
    7 % (at 2048 they were even). Without sharing (LLaDA) FA3 won from 2 blocks on, by up to 14 %.
    A single block was the same, or FA2's by 6 %. These are times of graphs, whose kernel is chosen
    when they are captured, by the blocks of a full batch.
    """
    is_shared = num_heads > num_kv_heads

    def choose(layout: AttentionLayout) -> str:
        lengths = np.diff(layout.qo_indptr)
        if lengths.max() > _LONG_ROWS:
            return "fa3"
        few, many = _FEW_SHARED if is_shared else _FEW
        return "fa3" if few <= len(lengths) <= many else "fa2"

    return choose
