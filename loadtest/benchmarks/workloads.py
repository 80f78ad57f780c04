"""What is decoded in the throughput benchmark: models, prompts, lengths, unmasking rules.

Decides the questions and the sizes; ``engine_throughput`` runs them.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sangam_core.decoding import Decoding, EosRule, Unmasking, UnmaskingRule
from sangam_worker.small_model.material import MAKERS, Message, held_out_items
from sangam_worker.small_model.tokens import EOS, encode_prompt

BLOCK_LENGTH = 32


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests for one model.

    Attributes:
        name, model: of the workload; of the engine's model.
        prompts: token ids, one list a request.
        num_alone: how many of them, from the first, the measurements at batch 1 take; all of
            them go to the one with several in flight. Fewer where a request takes seconds.
        num_blocks: the mask buffer, in blocks.
        share: part of the benchmark's time.
    """

    name: str
    model: str
    prompts: Sequence[Sequence[int]]
    num_alone: int
    num_blocks: int
    decoding: Decoding
    share: float


def workloads(concurrency: int = 8) -> list[Workload]:
    """The shipped model on real questions, and a random 100M-parameter LLaDA.

    Random weights are confident of nothing, so the threshold rule commits one token a pass; the
    fixed schedule (8 passes a block, 4 tokens a pass) is nearer to what trained models do.

    Args:
        concurrency: most requests in flight; there are at least as many prompts.
    """
    fixed = Unmasking(rule=UnmaskingRule.FIXED, steps=8)
    threshold = Unmasking(rule=UnmaskingRule.THRESHOLD, threshold=0.9)
    questions = _questions(4 * concurrency)
    prompts = _random_prompts(concurrency, num_tokens=64, vocab_size=8000)
    ends = Decoding(unmasking=threshold, eos_ids=(EOS,), eos_rule=EosRule.END)
    steps = Decoding(unmasking=fixed, eos_rule=EosRule.IGNORE)
    goes_on = Decoding(unmasking=threshold, eos_rule=EosRule.IGNORE)
    small, large = "small", "random:llada-100m"
    asked, some = len(questions), questions[: 2 * concurrency]
    return [
        Workload("shipped, questions", small, questions, asked, 4, ends, 0.15),
        Workload("shipped, fixed 8 passes", small, some, len(some), 2, steps, 0.1),
        Workload("100M, fixed 8 passes", large, prompts, 2, 2, steps, 0.4),
        Workload("100M, threshold 0.9", large, prompts, 1, 1, goes_on, 0.35),
    ]


def _questions(count: int) -> list[list[int]]:
    """Held-out questions of every kind in turn."""
    per_task = -(-count // len(MAKERS))
    by_task = [list(held_out_items(task, per_task)) for task in MAKERS]
    turns = [items[turn] for turn in range(per_task) for items in by_task if turn < len(items)]
    return [encode_prompt([Message("user", item.question)]) for item in turns[:count]]


def _random_prompts(count: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(20)
    return [[rng.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(count)]
