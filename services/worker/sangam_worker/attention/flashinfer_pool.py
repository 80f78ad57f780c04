"""The KV pool as FlashInfer's kernels see it: what its backends share.

Decides how rows get onto pages and what stands for a head dimension that the kernels lack (the
golden models' 16): zeros behind it. Queries and new rows are padded directly, pages in a copy; the
pool keeps its shape, so pages are as small, and transfers the same, as with any other backend.
Real models have 128 and copy nothing.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.flashinfer_library import FlashInfer, kernel_dim
from sangam_worker.kv_pool import KVPool
from sangam_worker.uploads import sent_together

NHD = "NHD"

RECOMMENDED_BYTES = 128 * 2**20
"""Of a workspace, by FlashInfer's documentation. Every wrapper adds 8 MiB for its plan, on the
device and pinned."""

_TILE_QUERIES = 128
"""Of one of FA2's thread blocks, at most."""


def workspace_bytes(num_heads: int, num_kv_heads: int, head_dim: int, num_processors: int) -> int:
    """What FA2 may need for partial results of split keys, and no less than is recommended.

    It splits until each of a GPU's multiprocessors has two thread blocks, which give float32
    answers and a sum for each query (0.6.18, ``PrefillPlanImpl``). With Dream-7B's heads that is
    more than the recommendation from 146 multiprocessors on; an H200 has 132.
    """
    num_splits = 2 * num_processors // num_kv_heads
    numbers = num_heads * num_splits * _TILE_QUERIES * (head_dim + 1)
    return max(RECOMMENDED_BYTES, 4 * numbers + 64)


def graph_workspace_bytes(
    num_heads: int, num_kv_heads: int, head_dim: int, num_sequences: int, rows_per_sequence: int
) -> int:
    """What FA2 asks for in a graph beyond a workspace of ``workspace_bytes``, from above.

    There each tile of queries, of which every sequence may leave one in part, may have partial
    results of its own (0.6.18, ``PrefillPlan`` with ``enable_cuda_graph``).
    """
    packed_rows = num_sequences * rows_per_sequence * (num_heads // num_kv_heads)
    num_tiles = -(-packed_rows // _TILE_QUERIES) + num_sequences - 1
    return 4 * num_heads * num_tiles * _TILE_QUERIES * (head_dim + 1) + 64


class FlashInferPool:
    """A pool in bfloat16, for a model with a number of query heads.

    Attributes:
        problem: the options of every wrapper's plan. head_dim: the model's; kernel_dim: the
            kernels'. workspace: for all wrappers, whose kernels run one after the other.

    Raises:
        ConfigurationError: no kernel has heads as large.
    """

    def __init__(self, pool: KVPool, num_heads: int, library: FlashInfer) -> None:
        self.pool, self.library, self.num_heads = pool, library, num_heads
        _, _, num_kv_heads, self.head_dim = pool.page_shape
        self.kernel_dim = kernel_dim(self.head_dim)
        self.is_narrow = self.kernel_dim > self.head_dim
        self.problem: dict[str, Any] = {
            "num_qo_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim_qk": self.kernel_dim,
            "causal": False,
            "sm_scale": self.head_dim**-0.5,  # of the model's dimension, not the padded one
            "q_data_type": pool.dtype,
            "kv_data_type": pool.dtype,
        }
        num_bytes = workspace_bytes(
            num_heads, num_kv_heads, self.kernel_dim, num_processors(pool.device)
        )
        self.workspace = torch.empty(num_bytes, dtype=torch.uint8, device=pool.device)
        self._flat_layers = [
            layer.view(-1, *pool.page_shape[2:]) for layer in pool.layers_and_scratch
        ]
        # To FlashInfer's append, all pages are one sequence's: its positions are then our slots,
        # and the rows of an iteration need no page table.
        num_pages = pool.total_pages + 1
        self._all_pages, self._all_pages_indptr, self._full_page = sent_together(
            [np.arange(num_pages), np.array([0, num_pages]), np.array([PAGE_TOKENS])],
            np.int32,
            pool.device,
        )

    def append(
        self, k_new: Tensor, v_new: Tensor, layer: int, sequences: Tensor, slots: Tensor
    ) -> None:
        """Keep K and V, ``[rows, kv_heads, head_dim]``, in a layer's slots.

        Args:
            sequences: zeros, int32 ``[rows]``. slots: ``page * 16 + slot``, int32 ``[rows]``.
        """
        if self.is_narrow:  # no kernel writes rows as narrow
            # A layer seen as half pages: K of page p is number 2p, V is 2p + 1.
            key_slots = slots.long()
            key_slots = key_slots + key_slots // PAGE_TOKENS * PAGE_TOKENS
            self._flat_layers[layer].index_copy_(0, key_slots, k_new)
            self._flat_layers[layer].index_copy_(0, key_slots + PAGE_TOKENS, v_new)
            return
        self.library.append_paged_kv_cache(
            k_new,
            v_new,
            sequences,
            slots,
            self.pool.layers_and_scratch[layer],
            self._all_pages,
            self._all_pages_indptr,
            self._full_page,
            kv_layout=NHD,
        )

    def widened(self, x: Tensor) -> Tensor:
        """``[..., head_dim]`` as the kernels take it."""
        return F.pad(x, (0, self.kernel_dim - self.head_dim)) if self.is_narrow else x


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 0 of what is none."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
