"""The KV pool as transfers see it: pages of a layer, to be copied or where they lie.

The engine's pool satisfies it, and so must a test's. The geometry is what two workers must agree
on.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from sangam_core.decoding import WireModel


class KVPool(Protocol):
    """Pages of every layer."""

    @property
    def layers(self) -> Sequence[torch.Tensor] | torch.Tensor:
        """``[pages, 2, 16, kv_heads, head_dim]`` for each layer, contiguous."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        ...

    @property
    def total_pages(self) -> int:
        """Pages in the pool."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        ...

    def gather(self, layer: int, pages: Sequence[int]) -> torch.Tensor:
        """A contiguous copy of pages of a layer: ``(len(pages), 2, 16, kv_heads, head_dim)``."""
        ...

    def scatter(self, layer: int, pages: Sequence[int], tensor: torch.Tensor) -> None:
        """Write what ``gather`` gave, here or elsewhere, into pages of a layer."""
        ...


class KVGeometry(WireModel):
    """What has to be equal on both sides.

    Attributes:
        page_shape: K and V, tokens a page, KV heads, head dimension.
        dtype: torch's name of the number format.
    """

    num_layers: int
    page_shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, pool: KVPool) -> "KVGeometry":
        """The geometry of a pool."""
        page = pool.gather(0, (0,))
        return cls(
            num_layers=pool.num_layers,
            page_shape=tuple(page.shape[1:]),
            dtype=str(page.dtype).removeprefix("torch."),
        )
