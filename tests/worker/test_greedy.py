"""Which rows go to a greedy kernel, and that outcomes are those of the torch rule."""

import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError

import pytest
import torch
from tests.worker.checkpoints import DREAM, LLADA
from tests.worker.greedy_kernel_checks import TorchGreedyKernel, random_rows
from tests.worker.interpreter import interpreted_kernel, needs_interpreter
from tests.worker.requests import a_decoding, a_pass

from sangam_core.decoding import Decoding, UnmaskingRule
from sangam_core.errors import ConfigurationError
from sangam_worker.models.config import read_model_config
from sangam_worker.plan import Pass, PassOutcome
from sangam_worker.sampling.greedy import GreedyKernel, greedy_kernel
from sangam_worker.sampling.sampler import Sampler
from sangam_worker.triton_compiler import first_use

MASKED = 5
GREEDY = {
    LLADA: [
        a_decoding(),
        a_decoding(UnmaskingRule.FIXED, steps=3),
        a_decoding(UnmaskingRule.FACTOR, factor=1.0),
        a_decoding(top_p=0.5, top_k=2),
    ],
    DREAM: [
        a_decoding(UnmaskingRule.CONFIDENCE_THRESHOLD, threshold=0.4),
        a_decoding(UnmaskingRule.MASKGIT_PLUS, steps=3),
        a_decoding(UnmaskingRule.TOPK_MARGIN, steps=3),
        a_decoding(UnmaskingRule.ENTROPY, steps=3),
    ],
}
OTHERS = {
    LLADA: [a_decoding(temperature=0.8, seed=3), a_decoding(temperature=0.8, top_p=0.7, seed=3)],
    DREAM: [
        a_decoding(UnmaskingRule.ENTROPY, steps=3, temperature=0.8, seed=3),
        a_decoding(UnmaskingRule.TOPK_MARGIN, steps=3, top_p=0.9),
        a_decoding(UnmaskingRule.MASKGIT_PLUS, steps=3, top_k=4),
    ],
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[GreedyKernel]:
    with interpreted_kernel() as kernel:
        yield kernel


def passes_of(decodings: list[Decoding]) -> list[Pass]:
    return [
        a_pass([5] * 20, name=str(n), masked=range(MASKED), block=range(20), decoding=decoding)
        for n, decoding in enumerate(decodings)
    ]


def sampled(
    kernel: GreedyKernel | None,
    model: Path,
    decodings: list[Decoding],
    dtype: torch.dtype = torch.float32,
) -> tuple[PassOutcome, ...]:
    config = read_model_config(model)
    logits = random_rows(48, config.vocab_size, spread=3.0).to(dtype)
    return Sampler(config, dtype, kernel).sample(logits, passes_of(decodings))


def assert_alike(
    got: tuple[PassOutcome, ...],
    expected: tuple[PassOutcome, ...],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Equal tokens at equal positions; confidences as near as the dtype lets them."""
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert (one.key, one.carry, one.error) == (other.key, other.carry, other.error)
        assert [(c.position, c.token) for c in one.commits] == [
            (c.position, c.token) for c in other.commits
        ]
        assert [c.confidence for c in one.commits] == pytest.approx(
            [c.confidence for c in other.commits], rel=tolerance, abs=1e-6
        )


@pytest.mark.parametrize("model", [LLADA, DREAM], ids=["llada", "dream"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_rows_get_from_a_kernel_what_torch_gives(model: Path, dtype: torch.dtype) -> None:
    for decodings in (GREEDY[model][:1], GREEDY[model], GREEDY[model] + OTHERS[model]):
        kernel = TorchGreedyKernel()
        expected = sampled(None, model, decodings, dtype)
        assert_alike(sampled(kernel, model, decodings, dtype), expected, dtype)
        assert len(kernel.calls) == 1


@needs_interpreter
@pytest.mark.parametrize("model", [LLADA, DREAM], ids=["llada", "dream"])
def test_the_real_kernel_decides_alike_beside_rows_that_are_drawn_otherwise(
    model: Path, interpreted: GreedyKernel
) -> None:
    decodings = [*GREEDY[model], *OTHERS[model]]
    assert_alike(sampled(interpreted, model, decodings), sampled(None, model, decodings))


@pytest.mark.parametrize("model", [LLADA, DREAM], ids=["llada", "dream"])
def test_rows_with_noise_or_filters_are_torchs_to_the_bit(model: Path) -> None:
    others = OTHERS[model]
    kernel = TorchGreedyKernel()
    assert sampled(kernel, model, others) == sampled(None, model, others)
    assert kernel.calls == []
    beside = sampled(kernel, model, [*others, GREEDY[model][0]])
    assert beside[: len(others)] == sampled(None, model, [*others, GREEDY[model][0]])[: len(others)]
    assert len(kernel.calls) == 1


def test_runner_up_and_entropy_are_asked_for_only_where_a_rule_ranks_by_them() -> None:
    kernel = TorchGreedyKernel()
    for model in (LLADA, DREAM):
        for decoding in GREEDY[model]:
            sampled(kernel, model, [decoding])
    assert [columns for _, columns in kernel.calls] == [2, 2, 2, 2, 2, 2, 4, 4]
    assert {rows for rows, _ in kernel.calls} == {48}


def test_a_row_that_is_no_number_costs_its_own_pass_with_a_kernel_too() -> None:
    config = read_model_config(DREAM)
    logits = random_rows(16, config.vocab_size)
    logits[2, 7] = torch.nan
    passes = passes_of([GREEDY[DREAM][0], GREEDY[DREAM][3]])
    bad, good = Sampler(config, torch.float32, TorchGreedyKernel()).sample(logits, passes)
    assert "not numbers" in str(bad.error)
    assert (bad.commits, good.error) == ((), None)
    assert good.commits


def test_passes_that_commit_nothing_do_not_disturb_the_others() -> None:
    config = read_model_config(LLADA)
    repeated = a_pass([5] * 4, name="repeated", masked=[], decoding=a_decoding(temperature=1.0))
    item = a_pass([5] * 4, masked=[0, 1], block=range(4))
    logits = random_rows(16, config.vocab_size)
    kernel = TorchGreedyKernel()
    sampler = Sampler(config, torch.float32, kernel)
    nothing, outcome = sampler.sample(logits, [repeated, item])
    assert nothing.commits == ()
    assert outcome.commits
    assert sampler.sample(logits[:0], [repeated])[0].commits == ()
    assert len(kernel.calls) == 1


def test_a_cpu_has_no_kernel() -> None:
    config = read_model_config(LLADA)
    assert greedy_kernel(config, torch.float32, torch.device("cpu")) is None


def test_a_gpu_without_triton_is_a_clear_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "sangam_worker.sampling.greedy_kernel", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigurationError, match=r"Triton.*pip install '\.\[gpu\]"):
        greedy_kernel(read_model_config(LLADA), torch.bfloat16, torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Failed to find C compiler.\nmore"), "Failed to find C compiler.;"),
        (CalledProcessError(1, ["gcc"]), "gcc"),
        (PermissionError(13, "Permission denied", "/root/.triton"), "/root/.triton"),
    ],
)
def test_what_triton_lacks_is_told_in_a_line(error: Exception, said: str) -> None:
    with pytest.raises(ConfigurationError, match="needs a C compiler") as told, first_use("It"):
        raise error
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_that_the_memory_ran_out_is_no_trouble_of_triton_s() -> None:
    with pytest.raises(torch.OutOfMemoryError), first_use("It"):
        raise torch.OutOfMemoryError("CUDA out of memory")
