"""The greedy kernel on a GPU: the checks of the interpreted one, and what only a GPU shows."""

import warnings
from collections.abc import Callable

import pytest
import torch
from tests.worker.checkpoints import DREAM
from tests.worker.greedy_kernel_checks import CHECKS, compare, random_rows
from tests.worker.requests import a_decoding, a_pass
from torch import Tensor

from sangam_core.decoding import UnmaskingRule
from sangam_worker.models.config import read_model_config
from sangam_worker.plan import Pass
from sangam_worker.sampling.greedy import GreedyKernel, greedy_kernel
from sangam_worker.sampling.sampler import Sampler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

VOCABULARIES = {"llada-8b": 126464, "dream-7b": 152064}


def on_gpu(logits: Tensor) -> Tensor:
    """The same rows on the GPU, strides and all."""
    moved = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="cuda")
    # What is expanded shares its memory, and cannot be written through.
    shared = [slice(1) if stride == 0 else slice(None) for stride in logits.stride()]
    moved[tuple(shared)].copy_(logits[tuple(shared)])
    return moved


def kernel_on_gpu(logits: Tensor, mask_id: int, num_columns: int) -> Tensor:
    """The kernel for logits of a CPU."""
    from sangam_worker.sampling.greedy_kernel import summarise

    return summarise(on_gpu(logits), mask_id, num_columns).cpu()


def mixed_passes() -> list[Pass]:
    decodings = [
        a_decoding(UnmaskingRule.CONFIDENCE_THRESHOLD, threshold=0.4),
        a_decoding(UnmaskingRule.ENTROPY, steps=3),
        a_decoding(UnmaskingRule.TOPK_MARGIN, steps=3),
        a_decoding(UnmaskingRule.MASKGIT_PLUS, steps=3, temperature=0.7, top_p=0.9, seed=4),
    ]
    return [
        a_pass([5] * 20, name=str(n), masked=range(7), block=range(20), decoding=decoding)
        for n, decoding in enumerate(decodings)
    ]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_kernel_on_a_gpu_gives(check: Callable[[GreedyKernel], None]) -> None:
    check(kernel_on_gpu)


@pytest.mark.parametrize("vocab_size", VOCABULARIES.values(), ids=VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_as_wide_as_the_models(vocab_size: int, dtype: torch.dtype) -> None:
    """In bfloat16 the best of so many often has an equal."""
    logits = random_rows(6, vocab_size).to(dtype)
    compare(kernel_on_gpu, logits, mask_id=vocab_size - 128)


def test_rows_beyond_two_to_the_31_entries() -> None:
    from sangam_worker.sampling.greedy_kernel import summarise

    logits = torch.zeros((17000, 126464), dtype=torch.bfloat16, device="cuda")
    logits[-1, 4321] = 9.0
    assert summarise(logits, 126336, 2)[-1, 0] == 4321


def test_an_iteration_waits_for_the_gpu_once() -> None:
    """Neither rows drawn otherwise nor unlike measures make it wait again before its one copy."""
    config = read_model_config(DREAM)
    kernel = greedy_kernel(config, torch.bfloat16, torch.device("cuda"))
    sampler = Sampler(config, torch.bfloat16, kernel)
    logits = random_rows(32, config.vocab_size).bfloat16().cuda()
    sampler.sample(logits, mixed_passes())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            sampler.sample(logits, mixed_passes())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    said = [str(each.message) for each in caught]
    assert sum("called a synchronizing CUDA operation" in text for text in said) == 1, said


def test_outcomes_are_those_of_torchs_operators_on_a_cpu() -> None:
    config = read_model_config(DREAM)
    logits = random_rows(32, config.vocab_size)
    kernel = greedy_kernel(config, torch.float32, torch.device("cuda"))
    assert kernel is not None
    got = Sampler(config, torch.float32, kernel).sample(logits.cuda(), mixed_passes())
    expected = Sampler(config, torch.float32).sample(logits, mixed_passes())
    for one, other in zip(got, expected, strict=True):
        assert [(c.position, c.token) for c in one.commits] == [
            (c.position, c.token) for c in other.commits
        ]
        assert [c.confidence for c in one.commits] == pytest.approx(
            [c.confidence for c in other.commits], rel=1e-5, abs=1e-6
        )
