"""The tilings of our own attention kernel, timed beside FlashInfer's backends."""

import pytest
import torch
from tests.worker.flashinfer_fake import FakeFlashInfer
from tests.worker.flashinfer_formulas import attend_blocks
from torch import Tensor

from benchmarks.gpu import operators
from benchmarks.gpu.breakdown import class_of
from benchmarks.iterations import BLOCK_LENGTH, Iteration
from sangam_worker.attention.blocks import Tiling
from sangam_worker.attention.flashinfer_backend import FlashInferAttention
from sangam_worker.attention.protocol import FixedBatch
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.random_models import random_config


def test_every_tiling_is_timed_on_the_iteration_s_pages_and_the_fastest_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = random_config("random:dream-100m")
    pool = KVPool(
        num_layers=2,
        total_pages=20,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.bfloat16,
    )
    seen: list[str] = []

    def attend(
        q: Tensor, pages: Tensor, batch: FixedBatch, tiling: Tiling, workspace: Tensor, out: Tensor
    ) -> None:
        assert batch.kv_lengths.tolist() == [96, 96]
        attend_blocks(q, pages, batch, tiling, workspace, out)
        seen.append(str(tiling))

    repeats: list[int] = []

    def seconds(runs: list[operators.Run], device: torch.device, num_repeats: int = 7) -> float:
        repeats.append(num_repeats)
        before = [layer.clone() for layer in pool.layers]
        for run in runs:
            run()
        for layer, old in zip(pool.layers, before, strict=True):
            assert not torch.equal(layer, old), "keys and values are kept, as with other backends"
            layer.zero_()
        return {"blocks 64x64/1": 0.5}.get(seen[-1], 2.0)

    monkeypatch.setattr(operators, "cold_seconds", seconds)
    backend = FlashInferAttention(
        pool, config.num_heads, FakeFlashInfer(), lambda _: "fa2", attend_blocks=attend
    )
    iteration = Iteration(0, 2, 96, BLOCK_LENGTH)
    assert operators.best_tiling(backend, pool, config, iteration) == ("blocks 64x64/1", 0.25)
    both = [each for each in dict.fromkeys(seen) for _ in pool.layers]
    assert seen == [*both, "blocks 64x64/1", "blocks 64x64/1"], "each through all layers"
    assert repeats == [3, 3, 7], "the fastest once more, as often as what it stands beside"


def test_a_profile_tells_our_kernels_from_others() -> None:
    assert class_of("attend_tile") == class_of("put_together") == "attention"
    assert class_of("rotate_and_append_rows") == "small kernels"
