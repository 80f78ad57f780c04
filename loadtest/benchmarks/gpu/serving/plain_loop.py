"""What a request costs the plain PyTorch loop at batch 1, from a few blocks.

Decides which blocks are measured (a few lengths, with as many passes as blocks take on average) and
that a request takes the sum of its blocks: the loop feeds the whole sequence at each block's start,
as the engine does. Called by the serving command.
"""

import time
from collections.abc import Sequence

import numpy as np

from baselines.fast_dllm import Decoding, Rule, generate
from baselines.llada_dense import DenseLlada
from benchmarks.gpu.parts import say
from benchmarks.gpu.serving.batch_one import Floats, Work
from benchmarks.workloads import BLOCK_LENGTH


def block_times(
    model: DenseLlada, lengths: Sequence[int], num_passes: int
) -> list[tuple[int, float]]:
    """Sequence length and seconds of a block in ``num_passes`` passes, the second run of two."""
    decoding = Decoding(Rule.FIXED, num_passes)
    found = []
    for total_tokens in lengths:
        prompt = [index % model.shape.mask_id for index in range(total_tokens - BLOCK_LENGTH)]
        for _ in range(2):
            started = time.perf_counter()
            generate(model, prompt, BLOCK_LENGTH, BLOCK_LENGTH, decoding)
            seconds = time.perf_counter() - started
        say(f"         plain loop, a block of {total_tokens} tokens: {seconds:.3f} s")
        found.append((total_tokens, seconds))
    return found


def service_seconds(measured: Sequence[tuple[int, float]], works: Sequence[Work]) -> Floats:
    """Of each request, block times between the measured lengths by straight lines."""
    lengths, seconds = np.array(sorted(measured)).T
    totals = np.array([work.total_tokens for work in works], dtype=np.float64)
    blocks = np.array([work.num_blocks for work in works], dtype=np.float64)
    return np.asarray(blocks * np.interp(totals, lengths, seconds))
