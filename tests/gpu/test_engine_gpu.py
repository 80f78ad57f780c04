"""Engines on a real GPU: what ``tests/worker/test_engine_checks.py`` checks on a CPU.

bfloat16 and FP8 against the float32 engine of a CPU, within what Monte Carlo roundings of their
number format explain. Kernels that are not there yet are compiled first, which takes minutes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.engines import NAMES, a_kind, model_at
from tests.gpu.marks import FLASHINFER_ON_A_GPU
from tests.worker.engine_checks import (
    MODELS,
    EngineKind,
    check_golden_states,
    check_logits,
    check_other_pages_are_untouched,
    check_packed_is_as_single,
    check_restarts_continue,
    check_runs_repeat,
    check_two_agree,
)

pytestmark = FLASHINFER_ON_A_GPU


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("name", NAMES)
def test_golden_states_under_teacher_forcing(name: str, family: str) -> None:
    has_graphs = "graph_block" in NAMES[name]
    # Graphs carry iterations without prefills alone: few in flight leave more of those.
    tally = check_golden_states(a_kind(name), family, in_flight=2 if has_graphs else 6)
    assert (tally.num_replayed > 0) == has_graphs


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_as_near_as_the_number_format_allows(
    name: str, model: str, tmp_path: Path
) -> None:
    check_logits(a_kind(name), model_at(model, tmp_path))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["flashinfer-fa2", "flashinfer-fa3", "graphs"])
def test_flashinfer_agrees_with_torch(name: str, model: str, tmp_path: Path) -> None:
    check_two_agree(a_kind("bfloat16"), a_kind(name), model_at(model, tmp_path))


CHECKS = [
    check_packed_is_as_single,
    check_runs_repeat,
    check_other_pages_are_untouched,
    check_restarts_continue,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("model", ["llada-64", "dream-tiny", "dream-128"])
@pytest.mark.parametrize("name", NAMES)
def test_engines_pass(
    name: str, model: str, check: Callable[[EngineKind, Path], Any], tmp_path: Path
) -> None:
    check(a_kind(name), model_at(model, tmp_path))
