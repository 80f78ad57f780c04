"""Decides what one training step sees: lengths, masking patterns and loss weights.

Called by ``train``. Everything follows from (seed, step), so that a resumed run sees the same
batches as an unbroken one.

Serving unmasks blocks of 32 from left to right behind a tail of masks. Half the samples are
masked that way: earlier blocks clean, one block partly masked (at random, or its right part),
later blocks masked. The others are masked uniformly over the whole answer, as LLaDA is trained.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sangam_worker.small_model import tokens
from sangam_worker.small_model.material import Message, dialogue, training_item

BLOCK = 32


@dataclass(frozen=True)
class Phase:
    """What is drawn from a step on."""

    first_step: int
    lengths: dict[int, float]  # shares of the mask buffer's lengths
    emphasis: dict[str, float] = field(default_factory=dict)  # factors on the tasks' weights
    plain: float = 0.0  # share of prompts that are the question alone for certain
    uniform: float = 0.35  # share of samples masked over the whole answer
    right_part: float = 0.2  # of the others, share whose block is masked in its right part
    later: float = 0.25  # weight of blocks behind the current one, whose predictions are unused


LATE = {
    "sum_small": 2.0,
    "sum3": 0.4,
    "reverse": 0.4,
    "story": 1.5,
    "count": 1.5,
    "retell": 1.5,
    "repeat": 1.5,
    "talk": 1.5,
}
# Short answers are learnt first; then sums, which take longest; then answers of several blocks.
PHASES = (
    Phase(0, {32: 0.75, 64: 0.25}),
    Phase(2000, {32: 0.8, 64: 0.2}, {"sum2": 2.0, "sum3": 2.0, "sum_small": 2.0}),
    Phase(3500, {32: 0.9, 64: 0.1}, {"sum2": 8.0, "sum_small": 12.0}, plain=0.8),
    Phase(5750, {32: 0.3, 64: 0.34, 96: 0.1, 128: 0.18, 256: 0.08}, LATE, plain=0.3),
    Phase(
        8250,
        {32: 0.25, 64: 0.33, 96: 0.12, 128: 0.2, 256: 0.1},
        {**LATE, "sum2": 1.5, "sum3": 0.6, "talk": 2.0, "retell": 2.0},
        plain=0.3,
        uniform=0.15,
        right_part=0.3,
        later=0.05,
    ),
    Phase(
        12500,
        {32: 0.35, 64: 0.27, 96: 0.1, 128: 0.17, 256: 0.11},
        {**LATE, "sum2": 2.5, "sum3": 1.0, "talk": 2.0, "retell": 2.0},
        plain=0.4,
        uniform=0.15,
        right_part=0.3,
        later=0.05,
    ),
)
CUT_KEPT = 0.1  # share kept of the samples whose answer does not fit the buffer
GROUP = 4  # batches drawn at once and sorted by prompt length, which saves padding
PADDING_WEIGHT = 12.0  # total loss weight of the EOS behind an answer


@dataclass(frozen=True)
class Batch:
    """Tensors of one step; masked answer positions have a weight above 0."""

    ids: Tensor  # [B, S] with masks
    targets: Tensor  # [B, S]
    weights: Tensor  # [B, S]
    key_bias: Tensor  # [B, 1, 1, S] bfloat16, added to scores: 0, or very low on padding


@dataclass(frozen=True)
class Sample:
    """One prompt, its answer padded with EOS to the mask buffer's length, and EOS count."""

    prompt: list[int]
    answer: list[int]
    padding: int


def draw_sample(length: int, phase: Phase, rng: random.Random) -> Sample:
    """Draw one training sample for a mask buffer of the given length."""
    while True:
        item = training_item(rng, phase.emphasis)
        answer = tokens.encode_text(item.answer)
        if len(answer) < length or rng.random() < CUT_KEPT:
            break
    answer = answer[:length]
    padding = length - len(answer)
    alone = phase.plain > 0 and rng.random() < phase.plain
    messages = [Message("user", item.question)] if alone else dialogue(item, rng)
    return Sample(tokens.encode_prompt(messages), answer + [tokens.EOS] * padding, padding)


def mask_weights(sample: Sample, phase: Phase, rng: random.Random) -> list[float]:
    """Choose what to mask; return each answer position's loss weight, 0 where it stays clean."""
    length = len(sample.answer)
    text = length - sample.padding
    weights = [0.0] * length
    if rng.random() < phase.uniform:
        ratio = max(rng.random(), 0.05)
        for place in range(length):
            if rng.random() < ratio:
                weights[place] = 1.0 / ratio
    else:
        used = min(text // BLOCK + 1, length // BLOCK)
        start = BLOCK * rng.randrange(used)
        end = start + BLOCK
        kind = rng.random()
        for place in range(end, length):
            weights[place] = phase.later
        if kind < 0.3:
            masked = list(range(start, end))
        elif kind < 0.3 + phase.right_part:
            masked = list(range(start + rng.randrange(min(BLOCK, text - start + 1) or 1), end))
        else:
            ratio = max(rng.random(), 0.05)
            masked = [place for place in range(start, end) if rng.random() < ratio]
        for place in masked:
            weights[place] = min(BLOCK / len(masked), 4.0)
    for place in range(text + 1, length):
        weights[place] *= min(1.0, PADDING_WEIGHT / sample.padding)
    return weights


def collate(samples: list[Sample], phase: Phase, rng: random.Random) -> Batch:
    """Mask the samples and pad them on the right to one length."""
    size = max(len(sample.prompt) + len(sample.answer) for sample in samples)
    ids = torch.full((len(samples), size), tokens.EOS)
    targets = ids.clone()
    weights = torch.zeros(len(samples), size)
    key_bias = torch.full((len(samples), 1, 1, size), -1e4, dtype=torch.bfloat16)
    for row, sample in enumerate(samples):
        chosen = mask_weights(sample, phase, rng)
        first, last = len(sample.prompt), len(sample.prompt) + len(sample.answer)
        shown = [
            tokens.MASK if weight else token
            for token, weight in zip(sample.answer, chosen, strict=True)
        ]
        targets[row, :last] = torch.tensor(sample.prompt + sample.answer)
        ids[row, :last] = torch.tensor(sample.prompt + shown)
        weights[row, first:last] = torch.tensor(chosen)
        key_bias[row, 0, 0, :last] = 0.0
    return Batch(ids, targets, weights, key_bias)


def _group(seed: int, group: int, batch_tokens: int) -> list[Batch]:
    """The batches of one group: one buffer length, sorted by prompt length, in random order."""
    rng = random.Random(f"batch {seed} {group}")
    phase = [phase for phase in PHASES if group * GROUP >= phase.first_step][-1]
    length = rng.choices(list(phase.lengths), weights=list(phase.lengths.values()))[0]
    rows = max(8, batch_tokens // (length + 80))
    samples = [draw_sample(length, phase, rng) for _ in range(GROUP * rows)]
    samples.sort(key=lambda sample: len(sample.prompt))
    batches = [collate(samples[at : at + rows], phase, rng) for at in range(0, len(samples), rows)]
    rng.shuffle(batches)
    return batches


def batches(seed: int, first_step: int, batch_tokens: int) -> Iterator[Batch]:
    """Yield the batches from ``first_step`` on, without end."""
    group = first_step // GROUP
    skip = first_step % GROUP
    while True:
        yield from _group(seed, group, batch_tokens)[skip:]
        group, skip = group + 1, 0
