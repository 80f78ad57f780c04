"""Decides how the evaluation decodes: Fast-dLLM's dual cache with the threshold rule, greedy.

Called by ``evaluate``. Dense and one sequence at a time; an independent, slow stand-in for the
serving engine, which must give the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sangam_worker.small_model import tokens
from sangam_worker.small_model.model import Llada


@dataclass(frozen=True)
class Decoded:
    """What one decode gave and cost."""

    text: str
    text_tokens: int  # before the first EOS
    passes: int
    blocks: int  # blocks that were begun
    finished: bool  # by EOS, and not by the end of the mask buffer


def commit(rows: Tensor, logits: Tensor, threshold: float) -> Tensor:
    """Fill masked rows [n] in place: the most confident one, and all at or above the threshold.

    The mask token is never predicted; confidences are float64 softmax probabilities.
    """
    scores = logits.double()
    scores[:, tokens.MASK] = -torch.inf
    confidence, token = torch.softmax(scores, dim=-1).max(dim=-1)
    confidence = torch.where(rows == tokens.MASK, confidence, -1.0)
    chosen = (confidence >= threshold) & (rows == tokens.MASK)
    chosen[confidence.argmax()] = True
    rows[chosen] = token[chosen]
    return chosen


def has_ended(answer: Tensor) -> bool:
    """Whether an EOS has no mask before it."""
    stops = ((answer == tokens.EOS) | (answer == tokens.MASK)).nonzero()
    return stops.numel() > 0 and bool(answer[stops[0, 0]] == tokens.EOS)


@torch.inference_mode()
def decode(
    net: Llada, prompt: list[int], length: int, threshold: float = 0.9, block: int = 32
) -> Decoded:
    """Decode one prompt with a mask buffer of ``length`` tokens."""
    ids = torch.tensor(prompt + [tokens.MASK] * length)
    answer = ids[len(prompt) :]
    passes = blocks = 0
    for start in range(len(prompt), len(ids), block):
        blocks += 1
        rows = ids[start : start + block]
        hidden, cache = net.hidden(ids[None])
        commit(rows, net.logits(hidden[0, start : start + block]), threshold)
        passes += 1
        while not has_ended(answer) and bool((rows == tokens.MASK).any()):
            hidden, cache = net.hidden(rows[None], cache=cache, start=start)
            commit(rows, net.logits(hidden[0]), threshold)
            passes += 1
        if has_ended(answer):
            break
    found = (answer == tokens.EOS).nonzero()
    ended = has_ended(answer)
    count = int(found[0, 0]) if ended else length
    return Decoded(tokens.decode(answer.tolist()), count, passes, blocks, ended)
