"""The index arrays of one bucket, at places that never change.

Decides what is written where, and what fills up a batch: sequences without queries, whose rows
have position 0 and are kept on the pool's scratch page, which nothing reads. Arrays are written
with numpy into one stretch of pinned memory and go to the device in one copy, as much of it as has
changed: between two passes over the same blocks only the tokens do. Called by ``runner``.
"""

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import NamedTuple

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
        total_pages: of the pool: a batch of its own pages cannot name more. scratch_page: nobody's.

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
            (np.int32, num_blocks + 1),
            (np.int32, num_blocks),
            # More than there are only where kernels are tried on a pool that is too small.
            (np.int32, max(total_pages, num_blocks * -(-block_tokens // PAGE_TOKENS))),
        ]
        num_bytes = sum(np.dtype(kind).itemsize * number for kind, number in parts)
        self._staging = _host_bytes(num_bytes, device)
        self._on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        host = _cut(self._staging, parts)
        (
            self._tokens,
            self._positions,
            self._slots,
            self._page_indptr,
            self._kv_lengths,
            self._pages,
        ) = (each.numpy() for each in host)
        self._token_bytes = self._tokens.nbytes
        self._row_bytes = num_bytes - self._pages.nbytes
        self.tokens, self.positions, slots, page_indptr, kv_lengths, pages = _cut(
            self._on_device, parts
        )
        # What else an attention backend plans with on the host, and copies itself.
        bounds: list[tuple[type[np.int64 | np.int32], int]] = [
            (np.int32, num_blocks + 1),
            (np.int32, num_blocks),
        ]
        self._bounds = _host_bytes(4 * (2 * num_blocks + 1), device)
        self._qo_indptr, self._last_lengths = (each.numpy() for each in _cut(self._bounds, bounds))
        self._full_indptr = np.arange(num_blocks + 1, dtype=np.int32) * np.int32(block_tokens)
        self._none_ragged = np.zeros(num_blocks, dtype=np.bool_)
        self.fixed = FixedBatch(
            num_blocks, block_tokens, self._lay_out_full(), slots, kv_lengths, page_indptr, pages
        )

    def feed(self, passes: Sequence[Pass]) -> None:
        """Write the passes' tokens, and send nothing yet."""
        stop = 0
        for item in passes:
            start, stop = stop, stop + self._block_tokens
            self._tokens[start:stop] = item.tokens

    def lay_out(self, key: LayoutKey) -> AttentionLayout:
        """Write everything else, and give the layout that an attention backend plans with."""
        num_passes, block_tokens = len(key), self._block_tokens
        num_rows = num_passes * block_tokens
        starts = [start for _, start, _ in key]
        seen = [sees for _, _, sees in key]
        places = [_place(pages, start, block_tokens, sees) for pages, start, sees in key]
        rows = self._positions[:num_rows].reshape(num_passes, block_tokens)
        np.add(np.array(starts)[:, None], self._every_row[:block_tokens], out=rows)
        self._positions[num_rows:] = 0
        np.concatenate([place.slots for place in places], out=self._slots[:num_rows])
        self._slots[num_rows:] = self._scratch_slots[num_rows:]
        return self._layout(np.array(seen, dtype=np.int32), [place.pages for place in places])

    def send_full(self) -> AttentionLayout:
        """Every sequence with all its queries, on the scratch page: what is captured."""
        self._lay_out_full()
        return self.fixed.full

    def send(self, layout: AttentionLayout | None) -> None:
        """Copy to the device: everything up to the layout's pages, or without one the tokens."""
        num_bytes = self._token_bytes
        if layout is not None:
            num_bytes = self._row_bytes + layout.kv_page_indices.nbytes
        self._on_device[:num_bytes].copy_(self._staging[:num_bytes], non_blocking=True)

    def _lay_out_full(self) -> AttentionLayout:
        """See ``send_full``."""
        self._slots[:] = self._scratch_slots
        page = np.array([self._scratch], dtype=np.int32)
        seen = np.full(self.num_blocks, PAGE_TOKENS, dtype=np.int32)
        layout = self._layout(seen, [page] * self.num_blocks)
        self.send(layout)
        # Of its own: the arrays will be other batches'.
        return AttentionLayout(*(getattr(layout, each.name).copy() for each in fields(layout)))

    def _layout(self, seen: Int32s, tables: Sequence[Int32s]) -> AttentionLayout:
        """Of some sequences and, behind them, as many empty ones as fill up the batch."""
        indptr, num_passes = self._page_indptr, len(seen)
        np.cumsum([len(table) for table in tables], out=indptr[1 : num_passes + 1])
        num_pages = indptr[num_passes]
        indptr[num_passes + 1 :] = num_pages
        np.concatenate(tables, out=self._pages[:num_pages])
        np.minimum(self._full_indptr, num_passes * self._block_tokens, out=self._qo_indptr)
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
            is_ragged=self._none_ragged,
            kv_page_indptr=indptr,
            kv_page_indices=self._pages[:num_pages],
            kv_last_page_lengths=self._last_lengths,
            write_rows=self._every_row,
            write_slots=self._slots.astype(np.int64),
        )


class _Place(NamedTuple):
    """Where a pass's K/V are: the same in every decode of a block.

    Attributes:
        slots: of its rows. pages: that it sees.
    """

    slots: Int32s
    pages: Int32s


@lru_cache(maxsize=256)
def _place(pages: tuple[int, ...], start: int, num_rows: int, sees: int) -> _Place:
    slots = contiguous_slots(pages, start, start + num_rows).astype(np.int32)
    return _Place(slots, np.array(pages[: -(-sees // PAGE_TOKENS)], dtype=np.int32))


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
