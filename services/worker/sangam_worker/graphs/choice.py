"""Which kernel attends in a graph: the one that is fastest on this device, for this many blocks.

Decides by time alone, among those that answer as the first one does: on random keys and values of
a usual length, through all layers, so that none finds its keys in a cache. It is measured at every
start, since what is fastest depends on the GPU, the model's heads and the number of blocks. Called
by ``runner`` before a graph is captured; the pool is nobody's then, and is zeros again afterwards.
"""

from collections.abc import Callable, Sequence

import structlog
import torch
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.protocol import Attention, KeepsRows
from sangam_worker.graphs.capture import Capture
from sangam_worker.graphs.static_batch import LayoutKey, StaticBatch
from sangam_worker.kv_pool import KVPool

_TOKENS = 1024
"""Of each sequence, where the pool has room."""

_LARGEST_ERROR = 1 / 16
"""Difference of two kernels' answers, of the largest answer. Rounding makes a hundredth; a kernel
that reads another position is off by as much as answers are large."""

log = structlog.get_logger(__name__)


class Trial:
    """Tries kernels for one size of batch.

    Args:
        num_heads: query heads.
    """

    def __init__(self, pool: KVPool, batch: StaticBatch, num_heads: int, capture: Capture) -> None:
        self._pool, self._batch, self._capture = pool, batch, capture
        fixed = batch.fixed
        _, _, _, head_dim = pool.page_shape
        shape = len(fixed.write_slots), num_heads, head_dim
        self._queries = torch.randn(shape, dtype=pool.dtype, device=pool.device)
        key = usual_layout(fixed.num_sequences, fixed.rows_per_sequence, pool.total_pages)
        self._num_pages = 1 + max(page for pages, _, _ in key for page in pages)
        for layer in pool.layers:
            layer[: self._num_pages].normal_()
        self._layout = batch.lay_out(key)
        batch.send(self._layout)

    def __call__(self, attention: Attention) -> tuple[float, Tensor]:
        """Seconds for all layers, and the last one's answers."""
        assert isinstance(attention, KeepsRows)
        attention.plan(self._layout)
        answers = self._queries.new_zeros(0)

        def run() -> None:
            nonlocal answers
            for layer in range(self._pool.num_layers):
                answers = attention.attend(self._queries, layer)

        seconds = self._capture.seconds(self._capture(run))
        return seconds, answers.to(torch.float32, copy=True)

    def end(self) -> None:
        """Leave zeros, as there were."""
        for layer in self._pool.layers:
            layer[: self._num_pages].zero_()


def usual_layout(num_sequences: int, block_tokens: int, total_pages: int) -> LayoutKey:
    """Sequences of a usual length that are at their last block, on pages that lie anywhere."""
    most_pages = min(_TOKENS // PAGE_TOKENS, max(1, total_pages // num_sequences))
    num_pages = max(most_pages, -(-block_tokens // PAGE_TOKENS))
    sees = num_pages * PAGE_TOKENS
    order = torch.randperm(num_sequences * num_pages, generator=torch.Generator().manual_seed(0))
    # In a pool that is too small, sequences share pages.
    numbers = (order % total_pages).view(num_sequences, num_pages).tolist()
    return tuple((tuple(pages), sees - block_tokens, sees) for pages in numbers)


def fastest(
    kernels: Sequence[str],
    make: Callable[[str], Attention],
    trial: Callable[[Attention], tuple[float, Tensor]],
) -> tuple[str, Attention]:
    """What attends fastest, and its name.

    The first kernel says what is right: of the others, one that fails, or answers otherwise, is
    left out with a warning.
    """
    name, best = kernels[0], make(kernels[0])
    trial(best)  # does not count: a device that had nothing to do is slow at first
    seconds, wanted = trial(best)
    least, limit = seconds, float(_LARGEST_ERROR * wanted.abs().max())
    for rival in kernels[1:]:
        try:
            attention = make(rival)
            seconds, answers = trial(attention)
        except Exception as error:  # noqa: BLE001 - its tiles are too large for the GPU, say
            log.warning("attention kernel left out", kernel=rival, error=str(error)[:300])
            continue
        difference = float((answers - wanted).abs().max())
        if not difference <= limit:  # nor where it is no number
            log.warning("attention kernel left out", kernel=rival, difference=difference)
        elif seconds < least:
            name, best, least = rival, attention, seconds
    return name, best
