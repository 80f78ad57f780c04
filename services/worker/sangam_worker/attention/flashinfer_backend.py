"""FlashInfer's attention over pages: decode blocks and whole prefills in one plan, no mask.

Decides how an iteration becomes FlashInfer's calls; ``flashinfer_layout`` makes their index arrays.
Called by ``transformer`` through the protocol, planned by ``engine``. Nothing is copied to the
device or read back after ``plan``. Sequences that keep no pages (cache ``none``) attend to
their own new rows in a second plan. Batches of one shape, for CUDA graphs: ``fixed``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sangam_core.errors import ConfigurationError
from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.blocks import (
    AttendBlocks,
    BlockKernel,
    Tiling,
    can_attend,
    tilings,
)
from sangam_worker.attention.fixed import FixedAttention, FixedKernel
from sangam_worker.attention.flashinfer_fixed import PlannedKernel
from sangam_worker.attention.flashinfer_layout import (
    ChooseKernel,
    PagedPart,
    measured_kernel,
    on_host,
    rows_of,
    split,
)
from sangam_worker.attention.flashinfer_pool import NHD, FlashInferPool, num_processors
from sangam_worker.attention.layout import AttentionLayout, Int32s, Int64s
from sangam_worker.attention.protocol import FixedBatch, Places
from sangam_worker.flashinfer_library import FlashInfer, load_flashinfer
from sangam_worker.kv_pool import KVPool
from sangam_worker.uploads import sent, sent_together


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """Sequences that one planned wrapper answers.

    Attributes:
        wrapper: of the paged or, with ``is_alone``, of the ragged kind.
        num_rows: queries. rows: where they are among all, ``None`` where they are all.
    """

    wrapper: Any
    is_alone: bool
    num_rows: int
    rows: Tensor | None


class FlashInferAttention:
    """``Attention`` over a ``KVPool`` in bfloat16.

    Args:
        num_heads: query heads.
        library: ``flashinfer``, or a fake of its semantics.
        choose: the kernel of an iteration.
        rivals: kernels of FlashInfer's that may be faster in a graph.
        attend_blocks: another one, for graphs, in any of its tilings.

    Raises:
        ConfigurationError: no kernel has heads as large.
    """

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        library: FlashInfer,
        choose: ChooseKernel,
        *,
        rivals: Sequence[str] = (),
        attend_blocks: AttendBlocks | None = None,
    ) -> None:
        self._pool, self._choose = pool, choose
        self._rivals, self._attend_blocks = rivals, attend_blocks
        self._pages = FlashInferPool(pool, num_heads, library)
        self._wrappers: dict[tuple[str, bool, bool], Any] = {}
        self._copied: torch.cuda.Event | None = None
        self._fixed_workspace, self._fixed_results = self._pages.workspace, torch.empty(0)

    def plan(self, layout: AttentionLayout) -> None:
        """Take the index arrays of the next iteration."""
        if self._copied is not None:
            # FlashInfer copies a plan from one pinned buffer: not to be overwritten before.
            self._copied.synchronize()
        paged, alone = split(layout)
        self._plan_writes(layout, paged)
        self._shares = {
            False: self._shares_of(layout, layout.qo_indptr, paged, alone, is_head=False),
            True: self._shares_of(layout, layout.head_indptr, paged, alone, is_head=True),
        }
        if self._pool.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def write(self, k_new: Tensor, v_new: Tensor, layer: int) -> None:
        """Keep the K/V of the rows that the layout says."""
        if not self._num_written:
            return
        if self._write_rows is not None:
            k_new = k_new.index_select(0, self._write_rows)
            v_new = v_new.index_select(0, self._write_rows)
        k_new, v_new = k_new[: self._num_written], v_new[: self._num_written]
        self._pages.append(k_new, v_new, layer, self._write_sequences, self._write_slots)

    def run(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, layer: int, *, head_rows_only: bool = False
    ) -> Tensor:
        """Keep the new K/V on their pages, then attend: every sequence of a kind in one call."""
        self.write(k_new, v_new, layer)
        return self._attend(q, layer, self._shares[head_rows_only], (k_new, v_new))

    def places(self) -> Places | None:
        """See ``KeepsRows``: where all rows are kept, in pages of the kernels' own width."""
        if self._pages.is_narrow or not self._num_written or self._write_rows is not None:
            return None
        return Places(self._pool.layers_and_scratch, self._write_slots)

    def attend(self, q: Tensor, layer: int) -> Tensor:
        """See ``KeepsRows``."""
        return self._attend(q, layer, self._shares[False], None)

    def _attend(
        self, q: Tensor, layer: int, shares: list[_Share], new: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """``new``: K and V of the rows, for sequences without pages."""
        q = self._pages.widened(q)
        out = q.new_empty(q.shape)
        num_answered = sum(share.num_rows for share in shares)
        if num_answered < len(out):
            out[num_answered:].zero_()
        for share in shares:
            if share.is_alone:
                assert new is not None, "these rows are kept nowhere"
                keys_values = self._own(*new)
            else:
                keys_values = (self._cache(layer),)
            if share.rows is None:
                queries, answers = q[: share.num_rows], out[: share.num_rows]
                share.wrapper.run(queries, *keys_values, out=answers)
            else:
                queries = q.index_select(0, share.rows)
                answers = share.wrapper.run(queries, *keys_values, out=torch.empty_like(queries))
                out.index_copy_(0, share.rows, answers)
        return out[:, :, : self._pages.head_dim].flatten(1)

    def fixed_kernels(self, batch: FixedBatch) -> Sequence[str]:
        """The one that is chosen for a full batch; then its rivals, if it has any."""
        chosen = self._choose(batch.full)
        others = [each for each in self._rivals if each != chosen]
        return (chosen, *others, *map(str, self._tilings(batch)))

    def fixed(self, batch: FixedBatch, kernel: str) -> FixedAttention:
        """Attention for batches of one shape; their memory is shared where the largest is first."""
        pages, num_rows = self._pages, len(batch.write_slots)
        if num_rows > len(self._fixed_results):
            self._fixed_results = torch.zeros(
                (num_rows, pages.num_heads, pages.kernel_dim),
                dtype=self._pool.dtype,
                device=self._pool.device,
            )
        # What another kernel left there would pass for the answers of one that gives none.
        self._fixed_results.zero_()
        return FixedAttention(pages, batch, self._fixed_results, self._fixed_kernel(batch, kernel))

    def _fixed_kernel(self, batch: FixedBatch, name: str) -> FixedKernel:
        for tiling in self._tilings(batch):
            if str(tiling) == name:
                assert self._attend_blocks is not None
                workspace = self._pages.workspace
                return BlockKernel(self._pool, batch, tiling, workspace, self._attend_blocks)
        kernel = PlannedKernel(self._pages, name, batch, self._fixed_workspace)
        if name != "fa2":
            return kernel
        needed_bytes = kernel.workspace_bytes()
        if needed_bytes <= len(self._fixed_workspace):
            return kernel
        self._fixed_workspace = self._pages.workspace.new_empty(needed_bytes)
        return PlannedKernel(self._pages, name, batch, self._fixed_workspace)

    def _tilings(self, batch: FixedBatch) -> Sequence[Tiling]:
        """Of our own kernel; none where it is not to be had."""
        pages = self._pages
        if self._attend_blocks is None or not can_attend(pages.head_dim):
            return ()
        _, _, num_kv_heads, _ = self._pool.page_shape
        return tilings(
            batch.num_sequences,
            batch.rows_per_sequence,
            pages.num_heads,
            num_kv_heads,
            num_processors(self._pool.device),
        )

    def _plan_writes(self, layout: AttentionLayout, paged: PagedPart) -> None:
        """Upload what ``write`` and the padded pages need, and the page table."""
        slots = layout.write_slots
        self._num_written = len(slots)
        self._write_sequences, self._write_slots, self._kv_indices = self._uploaded(
            np.zeros(len(slots), dtype=np.int32), slots, paged.kv_indices
        )
        is_every_row = self._num_written == layout.qo_indptr[-1]
        self._write_rows = None if is_every_row else self._rows(layout.write_rows)
        if self._pages.is_narrow:
            self._named_pages = self._kv_indices
            (self._kv_indices,) = self._uploaded(np.arange(len(paged.kv_indices)))

    def _shares_of(
        self,
        layout: AttentionLayout,
        indptr: Int32s,
        paged: PagedPart,
        alone: Int64s,
        *,
        is_head: bool,
    ) -> list[_Share]:
        """Plan the wrappers for queries with bounds ``indptr``; none where there are no rows."""
        kernel = self._choose(layout)
        shares = []
        for is_alone, sequences in ((False, paged.sequences), (True, alone)):
            own_indptr, rows = rows_of(indptr, sequences)
            if own_indptr[-1] == 0:
                continue
            wrapper = self._wrapper(kernel, is_alone, is_head)
            if is_alone:
                kv_indptr, kv_rows = rows_of(layout.qo_indptr, sequences)
                self._num_own = int(kv_indptr[-1])
                self._own_rows = None if kv_rows is None else self._rows(kv_rows)
                wrapper.plan(on_host(own_indptr), on_host(kv_indptr), **self._pages.problem)
            else:
                wrapper.plan(
                    on_host(own_indptr),
                    on_host(paged.kv_indptr),
                    self._kv_indices,
                    on_host(paged.last_page_lengths),
                    page_size=PAGE_TOKENS,
                    # Given, or FlashInfer's Python would compute them element by element.
                    seq_lens=on_host(layout.kv_lengths[paged.sequences]),
                    max_token_per_sequence=int(np.diff(own_indptr).max()),
                    **self._pages.problem,
                )
            on_device = None if rows is None else self._rows(rows)
            shares.append(_Share(wrapper, is_alone, int(own_indptr[-1]), on_device))
        return shares

    def _wrapper(self, kernel: str, is_alone: bool, is_head: bool) -> Any:
        """One wrapper for each plan that is alive at a time: a plan lives in its wrapper."""
        key = (kernel, is_alone, is_head)
        if key not in self._wrappers:
            library = self._pages.library
            make = (
                library.BatchPrefillWithRaggedKVCacheWrapper
                if is_alone
                else library.BatchPrefillWithPagedKVCacheWrapper
            )
            self._wrappers[key] = make(self._pages.workspace, NHD, backend=kernel)
        return self._wrappers[key]

    def _cache(self, layer: int) -> Tensor:
        """The pages that ``self._kv_indices`` number: the layer's own, or a padded copy."""
        pages = self._pool.layers[layer]
        if self._pages.is_narrow:
            return self._pages.widened(pages.index_select(0, self._named_pages))
        return pages

    def _own(self, k_new: Tensor, v_new: Tensor) -> tuple[Tensor, ...]:
        """The new K and V of the sequences without pages."""
        return self._own_side(k_new), self._own_side(v_new)

    def _own_side(self, new: Tensor) -> Tensor:
        if self._own_rows is None:
            return self._pages.widened(new[: self._num_own]).contiguous()
        return self._pages.widened(new.index_select(0, self._own_rows))

    def _uploaded(self, *arrays: Int32s | Int64s) -> tuple[Tensor, ...]:
        """As FlashInfer's kernels read them."""
        return sent_together(arrays, np.int32, self._pool.device)

    def _rows(self, numbers: Int64s) -> Tensor:
        """Row numbers on the device, int64 as torch's indexing wants them."""
        return sent(torch.from_numpy(numbers), self._pool.device)


def flashinfer_attention(
    pool: KVPool, num_heads: int, kernel: str | None = None, *, has_fa3: bool = True
) -> FlashInferAttention:
    """The backend on the installed library.

    Args:
        kernel: ``fa2`` or ``fa3`` for everything. By default the faster one, by an earlier
            measurement; graphs have what ``graphs.choice`` measures to be the fastest of these and
            of our own.
        has_fa3: whether FA3's kernels may be among them, where the GPU has them.

    Raises:
        ConfigurationError: it is not installed, or cannot run there.
    """
    library = load_flashinfer(pool.device, pool.dtype)
    is_hopper = torch.cuda.get_device_capability(pool.device)[0] == 9
    if kernel == "fa3" and not is_hopper:
        raise ConfigurationError("FlashInfer's FA3 kernels need a Hopper GPU (H100, H200)")
    if kernel is not None:
        return FlashInferAttention(pool, num_heads, library, lambda layout: kernel)
    from sangam_worker.attention.blocks_triton import attend_blocks

    has_fa3 = has_fa3 and is_hopper
    _, _, num_kv_heads, _ = pool.page_shape
    return FlashInferAttention(
        pool,
        num_heads,
        library,
        measured_kernel(num_heads, num_kv_heads) if has_fa3 else lambda layout: "fa2",
        rivals=("fa2", "fa3") if has_fa3 else (),
        attend_blocks=attend_blocks,
    )
