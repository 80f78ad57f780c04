"""The paged KV cache: one tensor a layer, K after RoPE, in the layout that FlashInfer reads.

Pure storage. Who owns which page is the scheduler's business (``pages``); the attention backend
writes and reads pages, transfers move them. ``gather`` and ``scatter`` may be called from another
thread than the engine's, on pages that the engine does not touch meanwhile.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS


class KVPool:
    """``layers[i]`` is ``(pages, 2, 16, kv_heads, head_dim)``: K, then V.

    Args:
        total_pages: pages of 16 tokens, each across all layers.

    Attributes:
        scratch_page: one more page, behind them, that is nobody's: rows that only fill up a batch
            write there, and nothing reads it. ``layers_and_scratch`` has it, ``layers`` does not.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        total_pages: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.total_pages = total_pages
        self.scratch_page = total_pages
        self.page_shape = (2, PAGE_TOKENS, num_kv_heads, head_dim)
        self.layers_and_scratch: tuple[Tensor, ...] = tuple(
            torch.zeros((total_pages + 1, *self.page_shape), dtype=dtype, device=device)
            for _ in range(num_layers)
        )
        self.layers: tuple[Tensor, ...] = tuple(
            layer[:total_pages] for layer in self.layers_and_scratch
        )

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layers)

    @property
    def dtype(self) -> torch.dtype:
        """Of K and V."""
        return self.layers[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.layers[0].device

    @property
    def bytes_per_layer_page(self) -> int:
        """Bytes of one page in one layer."""
        page = self.layers[0][:1]
        return page.numel() * page.element_size()

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page across all layers."""
        return self.bytes_per_layer_page * self.num_layers

    def gather(self, layer: int, pages: Sequence[int]) -> Tensor:
        """A contiguous copy of a layer's pages, ``(len(pages), 2, 16, kv_heads, head_dim)``."""
        return self.layers[layer].index_select(0, self._index(pages))

    def scatter(self, layer: int, pages: Sequence[int], tensor: Tensor) -> None:
        """Write pages of a layer from a tensor of ``gather``'s shape.

        Raises:
            ValueError: the tensor has another shape.
        """
        expected = (len(pages), *self.page_shape)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"pages of shape {tuple(tensor.shape)}, expected {expected}")
        self.layers[layer].index_copy_(0, self._index(pages), tensor.to(self.device))

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.device)
