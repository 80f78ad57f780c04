"""Turns a plan into one packed batch: rows without padding between them, and index arrays.

Decides which row predicts which masked position. Host arrays only (numpy): ``engine`` moves them
to the device in one go. Called by ``engine``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from sangam_core.geometry import PAGE_TOKENS
from sangam_core.rules import Family
from sangam_worker.attention.layout import AttentionLayout, Int32s, Int64s
from sangam_worker.plan import Pass
from sangam_worker.sampling.rules import committable


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
    """Concatenate the passes' rows."""
    positions = [np.asarray(item.positions, dtype=np.int64) for item in passes]
    qo_indptr = _indptr([len(part) for part in positions])
    head_rows = [
        start + _predicting_rows(item, part, family)
        for item, part, start in zip(passes, positions, qo_indptr.tolist(), strict=False)
    ]
    return PackedBatch(
        tokens=np.concatenate([np.asarray(item.tokens, dtype=np.int64) for item in passes]),
        positions=np.concatenate(positions),
        head_rows=np.concatenate(head_rows),
        layout=_layout(passes, positions, qo_indptr, _indptr([len(rows) for rows in head_rows])),
    )


def _predicting_rows(item: Pass, positions: Int64s, family: Family) -> Int64s:
    """Rows of the pass that predict its committable positions.

    Dream's logits are shifted by one: row p - 1 predicts p, and row 0 of a pass its own position
    too (position 0 of a sequence; never used in a block, whose first position commits in pass 0).
    """
    masked = np.asarray(committable(item, family), dtype=np.int64)
    if family == "dream":
        masked = np.maximum(masked - 1, positions[0])
    return np.searchsorted(positions, masked)


def _layout(
    passes: Sequence[Pass], positions: list[Int64s], qo_indptr: Int32s, head_indptr: Int32s
) -> AttentionLayout:
    kv_lengths = np.array([item.sees for item in passes], dtype=np.int32)
    is_ragged = np.array([len(item.positions) == item.sees for item in passes])
    pages = [
        np.asarray(item.pages[: 0 if alone else -(-item.sees // PAGE_TOKENS)], dtype=np.int32)
        for item, alone in zip(passes, is_ragged, strict=True)
    ]
    write_rows, write_slots = [], []
    for item, part, start in zip(passes, positions, qo_indptr.tolist(), strict=False):
        if item.pages:
            table = np.asarray(item.pages, dtype=np.int64)
            write_rows.append(start + np.arange(len(part), dtype=np.int64))
            write_slots.append(table[part // PAGE_TOKENS] * PAGE_TOKENS + part % PAGE_TOKENS)
    nothing = [np.zeros(0, dtype=np.int64)]
    return AttentionLayout(
        qo_indptr=qo_indptr,
        head_indptr=head_indptr,
        kv_lengths=kv_lengths,
        is_ragged=is_ragged,
        kv_page_indptr=_indptr([len(table) for table in pages]),
        kv_page_indices=np.concatenate(pages),
        kv_last_page_lengths=np.where(is_ragged, 0, (kv_lengths - 1) % PAGE_TOKENS + 1).astype(
            np.int32
        ),
        write_rows=np.concatenate(write_rows or nothing),
        write_slots=np.concatenate(write_slots or nothing),
    )


def _indptr(lengths: Sequence[int]) -> Int32s:
    return np.fromiter(accumulate(lengths, initial=0), dtype=np.int32, count=len(lengths) + 1)
