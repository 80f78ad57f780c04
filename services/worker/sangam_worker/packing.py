"""Turns a plan into one packed batch: rows without padding between them, and index arrays.

Decides which row predicts which masked position. Host arrays only (numpy): ``engine`` moves them
to the device in one go. Called by ``engine`` and ``graphs``.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sangam_core.geometry import PAGE_TOKENS
from sangam_core.rules import Family
from sangam_worker.attention.layout import AttentionLayout, Int64s
from sangam_worker.models.linear import padded_rows
from sangam_worker.plan import Pass
from sangam_worker.sampling.rules import committable

_SLOTS_OF_A_PAGE = np.arange(PAGE_TOKENS)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """The rows of an iteration.

    Attributes:
        tokens, positions: ``[rows]``.
        head_rows: packed rows whose predictions can commit: for every pass its committable
            positions in order.
        layout: whose rows they are (``layout.head_indptr`` cuts ``head_rows``).
    """

    tokens: Int64s
    positions: Int64s
    head_rows: Int64s
    layout: AttentionLayout


def pack(passes: Sequence[Pass], family: Family) -> PackedBatch:
    """Concatenate the passes' rows.

    Plain lists, turned into arrays once: at decode sizes an array operation costs more than what
    it saves, and an iteration would need a dozen of them for each pass. Only positions are arrays
    from the start: of a range without gaps numpy makes one in a hundredth of a list's time.
    """
    tokens: list[int] = []
    positions: list[Int64s] = []
    head_rows: list[int] = []
    qo_indptr, head_indptr = [0], [0]
    for item in passes:
        head_rows += _predicting_rows(item, len(tokens), family)
        tokens += item.tokens
        positions.append(_positions(item))
        qo_indptr.append(len(tokens))
        head_indptr.append(len(head_rows))
    return PackedBatch(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.concatenate(positions),
        head_rows=np.array(head_rows, dtype=np.int64),
        layout=_layout(passes, qo_indptr, head_indptr),
    )


def _positions(item: Pass) -> Int64s:
    fed = item.positions
    if is_contiguous(fed):
        return np.arange(fed[0], fed[-1] + 1, dtype=np.int64)
    return np.array(fed, dtype=np.int64)


def rows_that_predict(passes: Sequence[Pass], family: Family) -> Int64s:
    """Packed rows that predict the passes' committable positions, in order, for passes without
    padding between them; see ``PackedBatch.head_rows``."""
    first_row, rows = 0, []
    for item in passes:
        rows += _predicting_rows(item, first_row, family)
        first_row += len(item.positions)
    return np.array(rows, dtype=np.int64)


def padded(rows: Int64s) -> Int64s:
    """Zeros behind the rows, up to the padded row count of products."""
    with_zeros = np.zeros(padded_rows(len(rows)), dtype=np.int64)
    with_zeros[: len(rows)] = rows
    return with_zeros


def _predicting_rows(item: Pass, first_row: int, family: Family) -> list[int]:
    """Packed rows that predict the pass's committable positions, given its first packed row.

    Dream's logits are shifted by one: row p - 1 predicts p, and row 0 of a pass its own position
    too (position 0 of a sequence; never used in a block, whose first position commits in pass 0).
    """
    fed = item.positions
    wanted: Sequence[int] = committable(item, family)
    if family == "dream":
        wanted = [max(position - 1, fed[0]) for position in wanted]
    if is_contiguous(fed):
        shift = first_row - fed[0]
        return [position + shift for position in wanted]
    return [first_row + bisect_left(fed, position) for position in wanted]


def is_contiguous(ascending: Sequence[int]) -> bool:
    """Whether ascending positions have no gaps."""
    return ascending[-1] - ascending[0] + 1 == len(ascending)


def _layout(
    passes: Sequence[Pass], qo_indptr: Sequence[int], head_indptr: Sequence[int]
) -> AttentionLayout:
    is_ragged = [len(item.positions) == item.sees for item in passes]
    page_indices: list[int] = []
    page_indptr, last_page_lengths = [0], []
    written: list[Int64s] = []
    slots: list[Int64s] = []
    for item, alone, first_row in zip(passes, is_ragged, qo_indptr, strict=False):
        if not alone:
            page_indices += item.pages[: -(-item.sees // PAGE_TOKENS)]
        page_indptr.append(len(page_indices))
        last_page_lengths.append(0 if alone else (item.sees - 1) % PAGE_TOKENS + 1)
        if item.pages:
            written.append(np.arange(first_row, first_row + len(item.positions), dtype=np.int64))
            slots.append(_slots(item))
    nothing = [np.zeros(0, dtype=np.int64)]
    return AttentionLayout(
        qo_indptr=np.array(qo_indptr, dtype=np.int32),
        head_indptr=np.array(head_indptr, dtype=np.int32),
        kv_lengths=np.array([item.sees for item in passes], dtype=np.int32),
        is_ragged=np.array(is_ragged),
        kv_page_indptr=np.array(page_indptr, dtype=np.int32),
        kv_page_indices=np.array(page_indices, dtype=np.int32),
        kv_last_page_lengths=np.array(last_page_lengths, dtype=np.int32),
        write_rows=np.concatenate(written or nothing),
        write_slots=np.concatenate(slots or nothing),
    )


def _slots(item: Pass) -> Int64s:
    """Where the rows' K/V are kept: ``page * 16 + slot``."""
    fed = item.positions
    if is_contiguous(fed):
        return contiguous_slots(item.pages, fed[0], fed[-1] + 1)
    return _slots_at(item.pages, np.array(fed, dtype=np.int64))


@lru_cache(maxsize=256)
def contiguous_slots(pages: tuple[int, ...], start: int, stop: int) -> Int64s:
    """Slots of positions ``start .. stop - 1``: the same in every decode of a block."""
    first = start // PAGE_TOKENS
    table = np.array(pages[first : -(-stop // PAGE_TOKENS)], dtype=np.int64)
    slots = (table[:, None] * PAGE_TOKENS + _SLOTS_OF_A_PAGE).ravel()
    return slots[start - first * PAGE_TOKENS :][: stop - start]


def _slots_at(pages: tuple[int, ...], positions: Int64s) -> Int64s:
    table = np.array(pages, dtype=np.int64)
    return table[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
