"""FlashInfer's attention for batches of one shape, as a CUDA graph needs it.

Decides where the plan of the day lies: in device buffers that are made once, so that kernels that
were captured with one plan read the next one's. Made by ``flashinfer_backend``, called by
``fixed``.

What FlashInfer (0.6.18) asks of a wrapper with ``use_cuda_graph``: a batch size that never changes,
never more rows than in the first plan, page numbers that are on the device already. FA2's grid is
then the largest that the shape can need, with partial results for all of it: its workspace is asked
for by size, as that exceeds the recommended one from some 30 blocks of 32 queries on. FA3's
grid is the device, and its work list is part of the plan. Both leave out a sequence without
queries, which is what fills up a batch.
"""

from typing import Any

import torch
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.flashinfer_layout import on_host
from sangam_worker.attention.flashinfer_pool import NHD, FlashInferPool
from sangam_worker.attention.layout import AttentionLayout
from sangam_worker.attention.protocol import FixedBatch


class PlannedKernel:
    """One of FlashInfer's kernels as ``FixedAttention`` calls it.

    Args:
        kernel: ``fa2`` or ``fa3``.
        workspace: FlashInfer's, of at least what ``workspace_bytes`` says.
    """

    def __init__(
        self, pages: FlashInferPool, kernel: str, batch: FixedBatch, workspace: Tensor
    ) -> None:
        self._pages, self._batch = pages, batch
        num_sequences = batch.num_sequences
        self._wrapper = pages.library.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            NHD,
            use_cuda_graph=True,
            qo_indptr_buf=_int32s(num_sequences + 1, batch),
            paged_kv_indptr_buf=_int32s(num_sequences + 1, batch),
            paged_kv_indices_buf=torch.zeros_like(batch.page_indices),
            paged_kv_last_page_len_buf=_int32s(num_sequences, batch),
            backend=kernel,
        )

    def workspace_bytes(self) -> int:
        """What FA2 needs of the workspace, whatever the batch's layout."""
        needed, _ = self._wrapper.workspace_size(*self._arrays(self._batch.full), **self._options())
        return int(needed)

    def plan(self, layout: AttentionLayout) -> None:
        """See ``FixedAttention``: the page numbers are the device's, the rest FlashInfer copies."""
        self._wrapper.plan(
            *self._arrays(layout),
            **self._options(),
            # Given, or FlashInfer's Python would compute them element by element.
            seq_lens=on_host(layout.kv_lengths),
            max_token_per_sequence=self._batch.rows_per_sequence,
        )

    def attend(self, q: Tensor, layer: int, answers: Tensor) -> None:
        """See ``FixedKernel``."""
        pages = self._pages
        # Padded, the layer as a whole: it is a golden model's, and small.
        cache = pages.widened(pages.pool.layers_and_scratch[layer])
        self._wrapper.run(pages.widened(q), cache, out=answers)

    def _arrays(self, layout: AttentionLayout) -> tuple[Tensor, ...]:
        return (
            on_host(layout.qo_indptr),
            on_host(layout.kv_page_indptr),
            self._batch.page_indices[: len(layout.kv_page_indices)],
            on_host(layout.kv_last_page_lengths),
        )

    def _options(self) -> dict[str, Any]:
        return {"page_size": PAGE_TOKENS, **self._pages.problem}


def _int32s(number: int, batch: FixedBatch) -> Tensor:
    return torch.zeros(number, dtype=torch.int32, device=batch.write_slots.device)
