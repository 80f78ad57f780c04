"""Engines with one mistake each, for tests of the checks that are to find it.

The mistakes are those that a kernel would carry out without a word: index arrays and positions.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.layout import AttentionLayout
from sangam_worker.models.operators import TorchOperators

Mistake = Callable[[AttentionLayout], AttentionLayout]


class MistakenAttention:
    """A backend that is planned with a layout that is not quite right."""

    def __init__(self, backend: Any, mistake: Mistake) -> None:
        self._backend, self._mistake = backend, mistake

    def plan(self, layout: AttentionLayout) -> None:
        self._backend.plan(self._mistake(layout))

    def write(self, k_new: Tensor, v_new: Tensor, layer: int) -> None:
        self._backend.write(k_new, v_new, layer)

    def run(self, *args: Any, **options: Any) -> Tensor:
        out: Tensor = self._backend.run(*args, **options)
        return out


def another_page(layout: AttentionLayout) -> AttentionLayout:
    """The first cached sequence sees one of its pages twice, and another one never."""
    pages = layout.kv_page_indices.copy()
    if layout.kv_page_indptr[-1] > 1:
        pages[0] = pages[1]
    return replace(layout, kv_page_indices=pages)


def short_last_page(layout: AttentionLayout) -> AttentionLayout:
    """Cached sequences do not see their last position."""
    shorter = layout.kv_lengths - (~layout.is_ragged).astype(np.int32)
    last = np.where(layout.is_ragged, 0, (shorter - 1) % PAGE_TOKENS + 1)
    tables = [
        layout.kv_page_indices[start : start + -(-length // PAGE_TOKENS)]
        for start, length, ragged in zip(
            layout.kv_page_indptr, shorter, layout.is_ragged, strict=False
        )
        if not ragged
    ]
    counts = np.where(layout.is_ragged, 0, -(-shorter // PAGE_TOKENS))
    return replace(
        layout,
        kv_lengths=shorter,
        kv_page_indptr=np.concatenate(([0], counts.cumsum())).astype(np.int32),
        kv_page_indices=np.concatenate([*tables, np.zeros(0, dtype=np.int32)]),
        kv_last_page_lengths=last.astype(np.int32),
    )


def long_last_page(layout: AttentionLayout) -> AttentionLayout:
    """Cached sequences see one position too many, where their last page has it."""
    has_room = ~layout.is_ragged & (layout.kv_last_page_lengths < PAGE_TOKENS)
    more = has_room.astype(np.int32)
    return replace(
        layout,
        kv_lengths=layout.kv_lengths + more,
        kv_last_page_lengths=layout.kv_last_page_lengths + more,
    )


def shifted_slots(layout: AttentionLayout) -> AttentionLayout:
    """New rows are kept one slot too far."""
    return replace(layout, write_slots=layout.write_slots + 1)


class ShiftedRope(TorchOperators):
    """Batches of few rows, decodes that is, are rotated one position too far.

    Prefills are not, whose keys they see: attention sees differences of positions alone.
    """

    def rotation(self, positions: Tensor) -> Any:
        return super().rotation(positions + (len(positions) <= 64))


class Drifting(TorchOperators):
    """Its results depend on how often it was called."""

    num_calls = 0

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        self.num_calls += 1
        return super().norm(x, weight * (1 + 0.01 * self.num_calls))


class MixingRows(TorchOperators):
    """Rows depend on what else is in the batch."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed = super().norm(x, weight)
        return (normed + 0.2 * normed.mean(0)).to(normed.dtype)
