"""Which kernel attends in a graph: the fastest of those that answer as they should."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from tests.worker.attention_batches import a_pool
from tests.worker.graph_fake import EagerCapture
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.graphs.choice import Trial, fastest, usual_layout
from sangam_worker.graphs.static_batch import StaticBatch
from sangam_worker.kv_pool import KVPool

RIGHT = torch.tensor([1.0, -2.0, 0.5])


def choose(**found: tuple[float, Tensor] | Exception) -> tuple[str, Any]:
    """Of kernels that take so long and answer so; the first one is the first."""

    def trial(attention: Any) -> tuple[float, Tensor]:
        outcome = found[attention]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    make: Callable[[str], Any] = str
    return fastest([*found], make, trial)


def test_the_fastest_attends() -> None:
    assert choose(fa2=(3.0, RIGHT), fa3=(1.0, RIGHT), blocks=(2.0, RIGHT)) == ("fa3", "fa3")
    assert choose(fa2=(1.0, RIGHT), fa3=(3.0, RIGHT), blocks=(2.0, RIGHT)) == ("fa2", "fa2")
    assert choose(fa2=(1.0, RIGHT), fa3=(1.0, RIGHT)) == ("fa2", "fa2"), "as fast as the first"


@pytest.mark.parametrize(
    "answers",
    [RIGHT + torch.tensor([0.0, 0.0, 0.2]), torch.full((3,), torch.nan), 0 * RIGHT],
    ids=["off", "no numbers", "zeros"],
)
def test_a_kernel_whose_answers_are_wrong_is_left_out_and_told(answers: Tensor) -> None:
    with capture_logs() as logs:
        assert choose(fa2=(3.0, RIGHT), bad=(0.1, answers), fa3=(2.0, RIGHT)) == ("fa3", "fa3")
    assert [(each["log_level"], each["kernel"]) for each in logs] == [("warning", "bad")]


def test_rounding_is_not_wrong() -> None:
    assert choose(fa2=(3.0, RIGHT), other=(2.0, 1.01 * RIGHT))[0] == "other"


def test_a_kernel_that_cannot_run_is_left_out_and_told() -> None:
    with capture_logs() as logs:
        chosen = choose(fa2=(3.0, RIGHT), large=RuntimeError("out of shared memory"))
    assert chosen == ("fa2", "fa2")
    assert logs[0]["error"] == "out of shared memory"


def test_the_first_one_s_failure_is_everybody_s() -> None:
    with pytest.raises(RuntimeError, match="no GPU"):
        choose(fa2=RuntimeError("no GPU"), fa3=(1.0, RIGHT))


# What is tried


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


class Recorded:
    """Attention that notes what it finds."""

    def __init__(self, pool: KVPool, batch: StaticBatch) -> None:
        self._pool, self._batch = pool, batch
        self.layers: list[int] = []

    def plan(self, layout: Any) -> None:
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


def test_a_trial_attends_through_all_layers_to_random_numbers_and_leaves_zeros() -> None:
    pool = a_pool(2, 16, total_pages=12, dtype=torch.bfloat16)
    batch = StaticBatch(2, 32, pool.total_pages, pool.scratch_page, torch.device("cpu"))
    trial = Trial(pool, batch, 4, EagerCapture(times=[0.25]))
    attention = Recorded(pool, batch)
    seconds, answers = trial(attention)
    assert seconds == 0.25
    assert attention.layers == [0, 1] * 3, "to warm up, captured, timed"
    assert answers.dtype == torch.float32
    assert answers.shape == (64, 16)
    trial.end()
    for layer in pool.layers:
        assert (layer == 0).all()
