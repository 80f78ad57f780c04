"""Which kernel attends in a graph: on what they are tried."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from tests.worker.attention_batches import a_pool
from tests.worker.flashinfer_fake import FakeFlashInfer
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.flashinfer_backend import FlashInferAttention
from sangam_worker.attention.layout import AttentionLayout
from sangam_worker.attention.protocol import FixedBatch
from sangam_worker.graphs.choice import fastest_kernel, usual_layout
from sangam_worker.graphs.static_batch import StaticBatch
from sangam_worker.kv_pool import KVPool


@pytest.mark.parametrize(
    ("num_sequences", "total_pages", "num_pages"),
    [(2, 1000, 64), (4, 100, 25), (8, 5, 2), (1, 1, 2)],
)
def test_sequences_are_of_a_usual_length_or_what_the_pool_holds(
    num_sequences: int, total_pages: int, num_pages: int
) -> None:
    key = usual_layout(num_sequences, 32, total_pages)
    assert len(key) == num_sequences
    named = [page for pages, _, _ in key for page in pages]
    for pages, start, sees in key:
        assert (len(pages), start, sees) == (
            num_pages,
            num_pages * PAGE_TOKENS - 32,
            num_pages * PAGE_TOKENS,
        )
    assert max(named) < total_pages
    if len(named) <= total_pages:
        assert len({*named}) == len(named), "no page is two sequences'"
        assert named != sorted(named)


def test_a_pool_that_is_too_small_for_all_does_for_trials() -> None:
    batch = StaticBatch(8, 32, 12, 12, torch.device("cpu"))
    layout = batch.lay_out(usual_layout(8, 32, 12))
    batch.send(layout)
    assert layout.kv_page_indptr.tolist() == [*range(0, 17, 2)]
    assert batch.fixed.page_indices.tolist() == layout.kv_page_indices.tolist()


class Backend:
    """Two kernels, of which the second is faster; their attention notes what it finds."""

    def __init__(self, pool: KVPool, batch: StaticBatch) -> None:
        self._pool, self._batch = pool, batch
        self.layers: list[int] = []

    def fixed_kernels(self, batch: FixedBatch) -> list[str]:
        return ["slow", "fast"]

    def fixed(self, batch: FixedBatch, kernel: str) -> "Backend":
        return self

    def plan(self, layout: AttentionLayout) -> None:
        assert layout.kv_lengths.tolist() == [PAGE_TOKENS * 6] * 2
        assert self._batch.fixed.kv_lengths.tolist() == layout.kv_lengths.tolist()
        named = self._batch.fixed.page_indices[:12].long()
        for layer in self._pool.layers:
            assert layer[named].isfinite().all()
            assert layer[named].std() > 0.9

    def attend(self, q: Tensor, layer: int) -> Tensor:
        self.layers.append(layer)
        return q[:, 0] + layer

    def write(self, k_new: Tensor, v_new: Tensor, layer: int) -> None:
        raise AssertionError

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError

    def places(self) -> None:
        raise AssertionError


def test_kernels_are_tried_through_all_layers_on_random_numbers_and_leave_zeros() -> None:
    pool = a_pool(2, 16, total_pages=12, dtype=torch.bfloat16)
    batch = StaticBatch(2, 32, pool.total_pages, pool.scratch_page, torch.device("cpu"))
    backend, times = Backend(pool, batch), [0.0, 2.0, 1.0]

    def measure(run: Callable[[], None]) -> float:
        run()
        return times.pop(0)

    assert fastest_kernel(backend, pool, batch, 4, measure) == ("fast", 0.5)
    assert backend.layers == [0, 1] * 3, "the first one twice"
    for layer in pool.layers:
        assert (layer == 0).all()


def test_a_kernel_that_writes_nothing_does_not_pass_for_the_one_before_it() -> None:
    pool = a_pool(2, 64, total_pages=12, dtype=torch.bfloat16)
    batch = StaticBatch(2, 32, pool.total_pages, pool.scratch_page, torch.device("cpu"))
    times = [2.0, 2.0, 1.0, 1.0]
    backend = FlashInferAttention(
        pool, 2, FakeFlashInfer(), lambda _: "fa2", attend_blocks=lambda *arguments: None
    )

    def measure(run: Callable[[], None]) -> float:
        run()
        return times.pop(0)

    with capture_logs() as logs:
        assert fastest_kernel(backend, pool, batch, 2, measure) == ("fa2", 1.0)
    assert [each["name"] for each in logs] == ["blocks 32x64/1", "blocks 64x64/1"]
