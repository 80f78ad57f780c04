"""Iterations before the port opens: every kind fits the engine, the largest is the largest."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.checkpoints import DREAM, LLADA, an_engine, random_state, write_checkpoint
from tests.worker.checkpoints import llada_config as a_config

from sangam_core.errors import ConfigurationError
from sangam_worker.attention.flashinfer_layout import measured_kernel, rows_of, split
from sangam_worker.graphs.buckets import is_capturable
from sangam_worker.models.config import read_model_config
from sangam_worker.models.random_models import random_config
from sangam_worker.packing import pack
from sangam_worker.plan import Outcome, Plan
from sangam_worker.progress import SILENT
from sangam_worker.sizing import LargestIteration
from sangam_worker.warm_up import WarmUps, run_all

LLADA_8B, DREAM_7B = (random_config(f"random:{name}") for name in ("llada-8b", "dream-7b"))


class Recording:
    """Keeps the plans that it is asked to run."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def execute(self, plan: Plan) -> Outcome:
        self.plans.append(plan)
        return Outcome(plan.iteration, ())


@pytest.mark.parametrize("folder", [LLADA, DREAM])
@pytest.mark.parametrize(("block_length", "total_pages"), [(32, 64), (8, 2), (32, 1)])
def test_a_model_runs_them_all_on_pages_full_of_nan(
    folder: Path, block_length: int, total_pages: int
) -> None:
    engine = an_engine(folder, total_pages=total_pages)
    warm_ups = WarmUps(engine.model_config, block_length, total_pages)
    run_all(engine, warm_ups.of_every_kind(), SILENT)
    largest = warm_ups.largest(LargestIteration(1000, 160, 5))
    run_all(engine, [largest], SILENT)


def test_they_cover_prefills_decodes_noise_and_passes_without_pages() -> None:
    passes = [
        each for warm_up in WarmUps(LLADA_8B, 32, 100).of_every_kind() for each in warm_up.passes
    ]
    assert {each.is_whole_sequence for each in passes} == {True, False}
    assert any(each.decoding.temperature > 0 for each in passes)
    assert any(not each.pages for each in passes)
    assert all(page < 100 for each in passes for page in each.pages)


@pytest.mark.parametrize(("config", "group"), [(LLADA_8B, 1), (DREAM_7B, 7)])
def test_every_attention_kernel_that_an_iteration_may_choose_is_loaded(
    config: Any, group: int
) -> None:
    """FA2's by its tiles (``FA2DetermineCtaTileQ``), and both by whether there are pages."""
    choose = measured_kernel(config.num_heads, config.num_kv_heads)
    seen = set()
    for warm_up in WarmUps(config, 32, 100).of_every_kind():
        layout = pack(warm_up.passes, config.family).layout
        paged, alone = split(layout)
        for sequences, is_alone in ((paged.sequences, False), (alone, True)):
            for indptr in (layout.qo_indptr, layout.head_indptr):
                own, _ = rows_of(indptr, sequences)
                if own[-1]:
                    average = group * int(own[-1]) // len(sequences)
                    tile = 16 if average <= 16 else 64 if average <= 64 else 128
                    kernel = choose(layout)
                    seen.add((kernel, is_alone, tile if kernel == "fa2" else None))
    paged_tiles = {("fa2", False, tile) for tile in (16, 64, 128)}
    assert seen >= paged_tiles | {("fa3", False, None), ("fa3", True, None)}
    assert any(kernel == "fa2" and is_alone for kernel, is_alone, _ in seen)


@pytest.mark.parametrize("config", [LLADA_8B, DREAM_7B], ids=["llada", "dream"])
@pytest.mark.parametrize(
    "iteration",
    [
        LargestIteration(12288, 8192, 256),
        LargestIteration(139264, 8192, 256),
        LargestIteration(8192, 8192, 256),
        LargestIteration(5120, 2048, 64),
        LargestIteration(100, 32, 1),
    ],
)
def test_the_largest_has_as_many_rows_and_logits_as_an_iteration_can_have(
    config: Any, iteration: LargestIteration
) -> None:
    largest = WarmUps(config, 32, 10000).largest(iteration)
    batch = pack(largest.passes, config.family)
    most = min(iteration.num_rows, 4096 * iteration.num_blocks)
    assert len(batch.positions) == most
    assert len(largest.passes) <= iteration.num_blocks
    assert len(batch.head_rows) == min(iteration.num_head_rows, 32 * len(largest.passes))
    assert len(batch.head_rows) >= iteration.num_head_rows - 32
    assert not is_capturable(largest.passes, 32)
    plan = largest.plan
    assert plan.num_decode_tokens + plan.num_prefill_tokens == most


def test_sequences_stay_within_the_model_s_limit_and_the_pool() -> None:
    short = replace(LLADA_8B, max_sequence_tokens=1024)
    for config, total_pages, most in ((short, 10000, 1024), (LLADA_8B, 20, 320)):
        largest = WarmUps(config, 32, total_pages).largest(LargestIteration(9000, 640, 20))
        assert max(each.total_tokens for each in largest.passes) == most
        assert max(page for each in largest.passes for page in each.pages) < total_pages


def test_logits_that_are_not_numbers_stop_the_start(tmp_path: Path) -> None:
    state = random_state(a_config())
    state["model.transformer.ln_f.weight"] = torch.full((64,), torch.nan)
    engine = an_engine(write_checkpoint(tmp_path, a_config(), state))
    with pytest.raises(ConfigurationError, match=r"does not work: in a prefill.*not numbers"):
        run_all(engine, WarmUps(engine.model_config, 8, 64).of_every_kind(), SILENT)


def test_each_is_run_once_and_reported() -> None:
    engine = Recording()
    config = read_model_config(LLADA)
    warm_ups = WarmUps(config, 8, 64).of_every_kind()
    run_all(engine, warm_ups, SILENT)
    assert [plan.passes for plan in engine.plans] == [each.passes for each in warm_ups]
