"""A KV pool's layers as rows of 8-byte words, one row a page: what device copies move.

Bytes are all that a transfer knows of K and V, and wide words copy faster than narrow numbers. One
kernel a layer gathers or scatters its pages; the page numbers are on the device already. Called by
``nccl``, within a stream.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sangam_worker.transfer.chunks import Chunk

WORD = torch.int64


class LayeredPool(Protocol):
    """A KV pool whose pages can be reached without a copy."""

    @property
    def layers(self) -> Sequence[Tensor] | Tensor:
        """``[pages, 2, 16, kv_heads, head_dim]`` for each layer, contiguous."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        ...

    @property
    def total_pages(self) -> int:
        """Pages in the pool."""
        ...


class LayerRows:
    """Views of a pool; ``layers[i]`` is ``[pages, page_words]``."""

    def __init__(self, pool: LayeredPool) -> None:
        self.total_pages = pool.total_pages
        self.layers: tuple[Tensor, ...] = tuple(
            pool.layers[layer].view(pool.total_pages, -1).view(WORD)
            for layer in range(pool.num_layers)
        )
        self.page_words = self.layers[0].shape[1]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in one layer."""
        return self.page_words * WORD.itemsize

    def index(self, pages: Sequence[int]) -> Tensor:
        """Page numbers as a host tensor.

        Raises:
            ValueError: a page is not in the pool (a GPU would stop for good over it).
        """
        if not pages or min(pages) < 0 or max(pages) >= self.total_pages:
            raise ValueError(f"pages {list(pages)} of a pool of {self.total_pages}")
        return torch.tensor(pages, dtype=torch.int64)

    def gather(self, chunk: Chunk, index: Tensor, slot: Tensor) -> None:
        """Copy a chunk's pages into a slot."""
        for part in chunk:
            own = index[part.start : part.stop]
            torch.index_select(self.layers[part.layer], 0, own, out=slot[part.rows])

    def scatter(self, chunk: Chunk, index: Tensor, slot: Tensor) -> None:
        """Copy a slot into a chunk's pages."""
        for part in chunk:
            own = index[part.start : part.stop]
            self.layers[part.layer].index_copy_(0, own, slot[part.rows])
