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
from dataclasses import dataclass

import torch
from torch import Tensor

from sangam_worker.small_model import tokens
from sangam_worker.small_model.material import dialogue, training_item

BLOCK = 32
# Shares of the mask buffer's lengths, from a step on: short answers are learnt first.
LENGTHS: tuple[tuple[int, dict[int, float]], ...] = (
    (0, {32: 0.75, 64: 0.25}),
    (2000, {32: 0.35, 64: 0.35, 96: 0.1, 128: 0.15, 256: 0.05}),
    (4000, {32: 0.25, 64: 0.3, 96: 0.1, 128: 0.2, 256: 0.15}),
)
CUT_KEPT = 0.1  # share kept of the samples whose answer does not fit the buffer
GROUP = 4  # batches drawn at once and sorted by prompt length, which saves padding
PADDING_WEIGHT = 12.0  # total loss weight of the EOS behind an answer
LATER_WEIGHT = 0.25  # weight of blocks behind the current one, whose predictions are not used


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


def draw_sample(length: int, rng: random.Random) -> Sample:
    """Draw one training sample for a mask buffer of the given length."""
    while True:
        item = training_item(rng)
        answer = tokens.encode_text(item.answer)
        if len(answer) < length or rng.random() < CUT_KEPT:
            break
    answer = answer[:length]
    padding = length - len(answer)
    prompt = tokens.encode_prompt(dialogue(item, rng))
    return Sample(prompt, answer + [tokens.EOS] * padding, padding)


def mask_weights(sample: Sample, rng: random.Random) -> list[float]:
    """Choose what to mask; return each answer position's loss weight, 0 where it stays clean."""
    length = len(sample.answer)
    text = length - sample.padding
    weights = [0.0] * length
    if rng.random() < 0.35:
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
            weights[place] = LATER_WEIGHT
        if kind < 0.3:
            masked = list(range(start, end))
        elif kind < 0.5:
            masked = list(range(start + rng.randrange(min(BLOCK, text - start + 1) or 1), end))
        else:
            ratio = max(rng.random(), 0.05)
            masked = [place for place in range(start, end) if rng.random() < ratio]
        for place in masked:
            weights[place] = min(BLOCK / len(masked), 4.0)
    for place in range(text + 1, length):
        weights[place] *= min(1.0, PADDING_WEIGHT / sample.padding)
    return weights


def collate(samples: list[Sample], rng: random.Random) -> Batch:
    """Mask the samples and pad them on the right to one length."""
    size = max(len(sample.prompt) + len(sample.answer) for sample in samples)
    ids = torch.full((len(samples), size), tokens.EOS)
    targets = ids.clone()
    weights = torch.zeros(len(samples), size)
    key_bias = torch.full((len(samples), 1, 1, size), -1e4, dtype=torch.bfloat16)
    for row, sample in enumerate(samples):
        chosen = mask_weights(sample, rng)
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
    shares = [shares for first, shares in LENGTHS if group * GROUP >= first][-1]
    length = rng.choices(list(shares), weights=list(shares.values()))[0]
    rows = max(8, batch_tokens // (length + 80))
    samples = [draw_sample(length, rng) for _ in range(GROUP * rows)]
    samples.sort(key=lambda sample: len(sample.prompt))
    batches = [collate(samples[at : at + rows], rng) for at in range(0, len(samples), rows)]
    rng.shuffle(batches)
    return batches


def batches(seed: int, first_step: int, batch_tokens: int) -> Iterator[Batch]:
    """Yield the batches from ``first_step`` on, without end."""
    group = first_step // GROUP
    skip = first_step % GROUP
    while True:
        yield from _group(seed, group, batch_tokens)[skip:]
        group, skip = group + 1, 0
