"""The checks of ``engine_checks``: right engines pass each of them, and broken ones do not.

The same checks run on GPUs (``tests/gpu/test_engine_gpu.py``); FlashInfer is its fake here.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.worker.broken_engines import (
    Drifting,
    MistakenAttention,
    MixingRows,
    ShiftedRope,
    another_page,
    long_last_page,
    shifted_slots,
    short_last_page,
)
from tests.worker.checkpoints import write_checkpoint
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
    fails,
)
from tests.worker.flashinfer_fake import FakeFlashInfer
from tests.worker.graph_fake import EagerCapture
from tests.worker.serving_checks import check_a_worker_serves

from sangam_worker.attention.flashinfer_backend import FlashInferAttention
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.flashinfer_operators import FlashInferOperators
from sangam_worker.verify import engines
from sangam_worker.verify.engines import EngineNames
from sangam_worker.verify.rounding import number_format

BFLOAT16 = number_format(dtype="bfloat16")


class ForgetfulFlashInfer(FakeFlashInfer):
    """Without the record of calls, which would keep every tensor of thousands of passes."""

    def record(self, name: str, *args: Any, **kwargs: Any) -> None:
        pass


def flashinfer_engine(model: Path, total_pages: int, *, graph_block: int = 0) -> Engine:
    """bfloat16 with FlashInfer's fake, perhaps with graphs' fake."""
    fake = ForgetfulFlashInfer()
    engine = load_engine(
        str(model),
        dtype="bfloat16",
        total_pages=total_pages,
        attention=lambda pool, heads: FlashInferAttention(pool, heads, fake, lambda _: "fa2"),
        operators=lambda *args: FlashInferOperators(*args, fake),
        graph_buckets=(1, 2, 4) if graph_block else (),
        graph_block_tokens=graph_block or 32,
    )
    engine.capture_graphs(capture=EagerCapture())
    return engine


def named(**names: Any) -> EngineKind:
    given = EngineNames(**names)
    return EngineKind(given.load, given.number_format)


KINDS = {
    "float32": named(),
    "bfloat16": named(dtype="bfloat16"),
    "fp8": named(dtype="bfloat16", quantization="fp8"),
    "flashinfer": EngineKind(flashinfer_engine, BFLOAT16),
    "graphs": EngineKind(lambda *args: flashinfer_engine(*args, graph_block=8), BFLOAT16),
}


def model_at(name: str, tmp_path: Path) -> Path:
    model = MODELS[name]
    return model if isinstance(model, Path) else write_checkpoint(tmp_path / name, model)


# Right engines


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("kind", KINDS)
def test_golden_states_under_teacher_forcing(kind: str, family: str) -> None:
    # Graphs carry iterations without prefills alone: few in flight leave more of those.
    tally = check_golden_states(KINDS[kind], family, in_flight=2 if kind == "graphs" else 6)
    if KINDS[kind].number_format.is_exact:
        assert tally.num_equal_tokens == tally.num_tokens
        assert tally.num_equal_sets == tally.num_sets
        assert tally.max_confidence_difference == tally.logit_error == 0.0
    else:
        assert tally.num_equal_tokens / tally.num_tokens > (0.7 if kind == "fp8" else 0.95)
        assert 0.5 < tally.error_ratio < 1.5
    assert (tally.num_replayed > 0) == (kind == "graphs")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_as_near_as_the_number_format_allows(
    kind: str, name: str, tmp_path: Path
) -> None:
    check_logits(KINDS[kind], model_at(name, tmp_path))


CHECKS = [
    check_packed_is_as_single,
    check_runs_repeat,
    check_other_pages_are_untouched,
    check_restarts_continue,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["llada-64", "dream-tiny"])
@pytest.mark.parametrize("kind", KINDS)
def test_right_engines_pass(
    kind: str, name: str, check: Callable[[EngineKind, Path], Any], tmp_path: Path
) -> None:
    check(KINDS[kind], model_at(name, tmp_path))


@pytest.mark.parametrize("name", ["llada-64", "dream-128"])
def test_flashinfer_agrees_with_torch(name: str, tmp_path: Path) -> None:
    check_two_agree(KINDS["bfloat16"], KINDS["graphs"], model_at(name, tmp_path))


@pytest.mark.parametrize("kind", ["float32", "graphs"])
async def test_a_worker_serves_what_its_engine_gives(kind: str) -> None:
    await check_a_worker_serves(KINDS[kind], "llada")


# Broken ones


def broken(mistake: Any) -> EngineKind:
    """FlashInfer's fake with a mistaken layout, or torch in bfloat16 with mistaken operators."""
    fake = ForgetfulFlashInfer()

    def attention(pool: KVPool, num_heads: int) -> Any:
        return MistakenAttention(
            FlashInferAttention(pool, num_heads, fake, lambda _: "fa2"), mistake
        )

    options: dict[str, Any] = (
        {"operators": mistake} if isinstance(mistake, type) else {"attention": attention}
    )
    return EngineKind(
        lambda model, pages: load_engine(
            str(model), dtype="bfloat16", total_pages=pages, **options
        ),
        BFLOAT16,
    )


def test_engines_of_the_same_names_have_the_same_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A measurement may end otherwise the next time; "the same bits" are checked on two engines."""
    asked: list[dict[str, Any]] = []
    engine = SimpleNamespace(capture_graphs=lambda **given: asked.append(given))
    monkeypatch.setattr(engines, "load_engine", lambda *args, **kwargs: engine)
    EngineNames(graph_block=8).load(tmp_path, 40)
    assert asked == [{"is_measured": False}]


def test_what_is_broken_is_right_without_its_mistake() -> None:
    check_golden_states(broken(lambda layout: layout), "dream")


@pytest.mark.parametrize(
    "mistake",
    [another_page, short_last_page, long_last_page, shifted_slots, ShiftedRope, MixingRows],
)
@pytest.mark.parametrize("check", [check_golden_states, check_logits])
def test_wrong_logits_are_noticed(check: Any, mistake: Any, tmp_path: Path) -> None:
    with fails():
        check(
            broken(mistake),
            "llada" if check is check_golden_states else model_at("dream-tiny", tmp_path),
        )


@pytest.mark.parametrize("mistake", [another_page, short_last_page, ShiftedRope])
def test_two_that_do_not_agree_are_noticed(mistake: Any, tmp_path: Path) -> None:
    with fails():
        check_two_agree(KINDS["bfloat16"], broken(mistake), model_at("dream-128", tmp_path))


@pytest.mark.parametrize(
    ("check", "mistake"),
    [
        (check_packed_is_as_single, MixingRows),
        (check_runs_repeat, Drifting),
        (check_other_pages_are_untouched, shifted_slots),
        (check_restarts_continue, Drifting),
    ],
)
def test_other_mistakes_are_noticed(check: Any, mistake: Any, tmp_path: Path) -> None:
    with fails():
        check(broken(mistake), model_at("llada-64", tmp_path))


async def test_a_worker_that_serves_something_else_is_noticed() -> None:
    numbers = count()

    def load(model: Path, total_pages: int) -> Engine:
        kind = broken(ShiftedRope) if next(numbers) else KINDS["bfloat16"]
        return kind.load(model, total_pages)

    with fails():
        await check_a_worker_serves(EngineKind(load, BFLOAT16), "llada")
