"""The index arrays of one bucket, at places that never change.

Decides what is written where, and what fills up a batch: sequences without queries, whose rows
have position 0 and are kept on the pool's scratch page, which nothing reads. Arrays are written
with numpy into one stretch of pinned memory and go to the device in one copy, as much of it as has
changed: between two passes over the same blocks only the tokens do. Called by ``runner``.
"""

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.layout import AttentionLayout, Int32s
from sangam_worker.attention.protocol import FixedBatch
from sangam_worker.models.linear import padded_rows
from sangam_worker.packing import contiguous_slots
from sangam_worker.plan import Pass

LayoutKey = tuple[tuple[tuple[int, ...], int, int], ...]
"""Of every pass its pages, its first position and what it sees: all that a layout depends on."""


def layout_key(passes: Sequence[Pass]) -> LayoutKey:
    """What tells two iterations of a bucket apart, but for their tokens."""
    return tuple([(item.pages, item.positions[0], item.sees) for item in passes])


class StaticBatch:
    """Room for ``num_blocks`` blocks of ``block_tokens`` rows.

    Args:
        total_pages: of the pool: a batch cannot name more. scratch_page: nobody's.

    Attributes:
        tokens, positions: on the device, int64 ``[rows]``. fixed: the shape for the attention
            backend, with the other arrays on the device.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        total_pages: int,
        scratch_page: int,
        device: torch.device,
    ) -> None:
        self.num_blocks, self._block_tokens = num_blocks, block_tokens
        num_rows = padded_rows(num_blocks * block_tokens)
        self._scratch = scratch_page
        self._every_row = np.arange(num_rows, dtype=np.int64)
        self._scratch_slots = scratch_page * PAGE_TOKENS + self._every_row % PAGE_TOKENS
        # The most volatile first: what is behind the last change stays where it is.
        parts: list[tuple[type[np.int64 | np.int32], int]] = [
            (np.int64, num_rows),
            (np.int64, num_rows),
            (np.int32, num_rows),
            (np.int32, max(total_pages, num_blocks)),
        ]
        num_bytes = sum(np.dtype(kind).itemsize * number for kind, number in parts)
        self._staging = _host_bytes(num_bytes, device)
        self._on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        host = _cut(self._staging, parts)
        self._tokens, self._positions, self._slots, self._pages = (each.numpy() for each in host)
        self._token_bytes = self._tokens.nbytes
        self._row_bytes = self._token_bytes + self._positions.nbytes + self._slots.nbytes
        self.tokens, self.positions, slots, pages = _cut(self._on_device, parts)
        # What the attention backend plans with on the host, and copies itself.
        bounds: list[tuple[type[np.int64 | np.int32], int]] = [
            (np.int32, num_blocks + 1),
            (np.int32, num_blocks + 1),
            (np.int32, num_blocks),
            (np.int32, num_blocks),
        ]
        self._bounds = _host_bytes(4 * (4 * num_blocks + 2), device)
        self._qo_indptr, self._page_indptr, self._last_lengths, self._kv_lengths = (
            each.numpy() for each in _cut(self._bounds, bounds)
        )
        self.fixed = FixedBatch(num_blocks, block_tokens, self._lay_out_full(), slots, pages)

    def feed(self, passes: Sequence[Pass]) -> None:
        """Write the passes' tokens, and send nothing yet."""
        stop = 0
        for item in passes:
            start, stop = stop, stop + self._block_tokens
            self._tokens[start:stop] = item.tokens

    def lay_out(self, passes: Sequence[Pass]) -> AttentionLayout:
        """Write everything else, and give the layout that an attention backend plans with."""
        starts = np.array([item.positions[0] for item in passes], dtype=np.int64)
        rows = starts[:, None] + np.arange(self._block_tokens)
        num_rows, num_passes = rows.size, len(passes)
        self._positions[:num_rows] = rows.ravel()
        self._positions[num_rows:] = 0
        np.concatenate([_slots_of(item) for item in passes], out=self._slots[:num_rows])
        self._slots[num_rows:] = self._scratch_slots[num_rows:]
        seen = np.array([item.sees for item in passes], dtype=np.int32)
        tables = [_page_array(item.pages, -(-item.sees // PAGE_TOKENS)) for item in passes]
        return self._layout(num_passes, seen, tables)

    def send(self, layout: AttentionLayout | None) -> None:
        """Copy to the device: everything up to the layout's pages, or without one the tokens."""
        num_bytes = self._token_bytes
        if layout is not None:
            num_bytes = self._row_bytes + layout.kv_page_indices.nbytes
        self._on_device[:num_bytes].copy_(self._staging[:num_bytes], non_blocking=True)

    def _lay_out_full(self) -> AttentionLayout:
        """Every sequence with all its queries, on the scratch page: what is captured."""
        self._slots[:] = self._scratch_slots
        page = np.array([self._scratch], dtype=np.int32)
        seen = np.full(self.num_blocks, PAGE_TOKENS, dtype=np.int32)
        layout = self._layout(self.num_blocks, seen, [page] * self.num_blocks)
        self.send(layout)
        # Of its own: the arrays will be other batches'.
        return AttentionLayout(*(getattr(layout, each.name).copy() for each in fields(layout)))

    def _layout(self, num_passes: int, seen: Int32s, tables: Sequence[Int32s]) -> AttentionLayout:
        """Of ``num_passes`` sequences and, behind them, as many empty ones as fill up the batch."""
        indptr = self._page_indptr
        np.cumsum([len(table) for table in tables], out=indptr[1 : num_passes + 1])
        num_pages = indptr[num_passes]
        indptr[num_passes + 1 :] = num_pages
        np.concatenate(tables, out=self._pages[:num_pages])
        bound = num_passes * self._block_tokens
        self._qo_indptr[: num_passes + 1] = np.arange(0, bound + 1, self._block_tokens)
        self._qo_indptr[num_passes + 1 :] = bound
        for lengths, of_passes in (
            (self._kv_lengths, seen),
            (self._last_lengths, (seen - 1) % PAGE_TOKENS + 1),
        ):
            lengths[:num_passes] = of_passes
            lengths[num_passes:] = 0
        return AttentionLayout(
            qo_indptr=self._qo_indptr,
            head_indptr=self._qo_indptr,
            kv_lengths=self._kv_lengths,
            is_ragged=np.zeros(self.num_blocks, dtype=np.bool_),
            kv_page_indptr=indptr,
            kv_page_indices=self._pages[:num_pages],
            kv_last_page_lengths=self._last_lengths,
            write_rows=self._every_row,
            write_slots=self._slots.astype(np.int64),
        )


def _slots_of(item: Pass) -> Int32s:
    first = item.positions[0]
    return _narrowed_slots(item.pages, first, first + len(item.positions))


@lru_cache(maxsize=256)
def _narrowed_slots(pages: tuple[int, ...], start: int, stop: int) -> Int32s:
    return contiguous_slots(pages, start, stop).astype(np.int32)


@lru_cache(maxsize=256)
def _page_array(pages: tuple[int, ...], number: int) -> Int32s:
    """The first ``number`` pages: the same in every decode of a block."""
    return np.array(pages[:number], dtype=np.int32)


def _host_bytes(number: int, device: torch.device) -> Tensor:
    return torch.zeros(number, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _cut(stretch: Tensor, parts: Sequence[tuple[type[np.int64 | np.int32], int]]) -> list[Tensor]:
    """Bytes as arrays behind each other."""
    arrays, stop = [], 0
    for kind, number in parts:
        start, stop = stop, stop + np.dtype(kind).itemsize * number
        dtype = torch.int64 if kind is np.int64 else torch.int32
        arrays.append(stretch[start:stop].view(dtype))
    return arrays
