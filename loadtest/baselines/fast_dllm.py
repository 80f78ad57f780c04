"""Fast-dLLM's dual cache as a plain loop at batch 1: the baseline of the throughput benchmark.

Decides what each pass feeds and commits, greedily, after the public code
(``generate_with_dual_cache`` of June 2025). Called by ``benchmarks/engine_throughput.py`` and, on a
GPU, by ``benchmarks/gpu``; checked, token for token, against the golden cases. Where the public
code leaves a choice, or wastes time that a good engineer would not, the baseline takes the faster
way, so that it is worth being compared with:

* the head and the float64 softmax run on the block's rows only (public: on every row of the
  whole-sequence pass too); the softmax is otherwise the public one, over the whole vocabulary;
* rotated keys are cached, so that cached ones are not rotated again in every pass;
* rows are written into the cache in place of a boolean scatter over a copy of it;
* "is the block complete?" is asked before a pass, not after (later public revisions do too);
* the selection is vectorised (public: a Python loop over the candidates);
* it may end at an EOS by the engine's rule (``end``), which the public code never does.

A predicted mask token is no candidate, as in the engine; the public loop would never end on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from baselines.llada_dense import DenseLlada


class Rule(StrEnum):
    """Which of a pass's predictions are committed."""

    THRESHOLD = "threshold"
    FIXED = "fixed"
    FACTOR = "factor"


class Eos(StrEnum):
    """What an end token does: nothing, end the answer, or fill what is behind it (dInfer's)."""

    IGNORE = "ignore"
    END = "end"
    FILL = "fill"


@dataclass(frozen=True, slots=True)
class Decoding:
    """How masks are filled.

    Attributes:
        value: the rule's parameter: confidence (inclusive), passes per block, or factor.
        eos_ids: end tokens, for ``eos`` other than ``ignore``.
    """

    rule: Rule = Rule.THRESHOLD
    value: float = 0.9
    eos: Eos = Eos.IGNORE
    eos_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Generation:
    """The whole sequence, prompt included, and the number of forward passes it took."""

    ids: list[int]
    num_passes: int


@torch.inference_mode()
def generate(
    model: DenseLlada,
    prompt: Sequence[int],
    gen_length: int,
    block_length: int,
    decoding: Decoding,
) -> Generation:
    """Answer one prompt with ``gen_length`` masks, a whole number of blocks.

    Raises:
        ValueError: ``gen_length`` is no multiple of ``block_length``, or too long for the model.
    """
    if gen_length % block_length:
        raise ValueError(f"gen_length {gen_length} is not whole blocks of {block_length}")
    mask_id = model.shape.mask_id
    masks = [mask_id] * gen_length
    ids = torch.tensor([*prompt, *masks], dtype=torch.int64, device=model.device)
    cache = model.new_cache(len(ids))
    num_passes, has_ended = 0, False
    for start in range(len(prompt), len(ids), block_length):
        block = ids[start : start + block_length]  # a view: commits land in ``ids``
        num_masks = int((block == mask_id).sum())
        step = 0
        while (block == mask_id).any() and not has_ended:
            if step == 0:
                rows = model.hidden(ids, 0, cache)[start : start + block_length]
            else:
                rows = model.hidden(block, start, cache)
            _commit(block, model.logits(rows), mask_id, decoding, num_masks, step)
            if decoding.eos is Eos.FILL and step > 0:
                _fill_behind_eos(ids, decoding.eos_ids)
            step += 1
            has_ended = _has_ended(ids, len(prompt), start + block_length, mask_id, decoding)
        num_passes += step
    return Generation(ids.tolist(), num_passes)


def _commit(
    block: Tensor, logits: Tensor, mask_id: int, decoding: Decoding, num_masks: int, step: int
) -> None:
    """Write the predictions that the rule selects into the block's ids."""
    probabilities = torch.softmax(logits.to(torch.float64), dim=-1)
    logits[:, mask_id] = -torch.inf
    tokens = logits.argmax(dim=-1)
    confidence = probabilities.gather(-1, tokens[:, None])[:, 0]
    confidence = torch.where(block == mask_id, confidence, -torch.inf)
    if decoding.rule is Rule.THRESHOLD:
        chosen = confidence >= decoding.value
        chosen[confidence.argmax()] = True
    elif decoding.rule is Rule.FIXED:
        count, rest = divmod(num_masks, int(decoding.value))
        chosen = _best(confidence, count + (step < rest))
    else:
        chosen = _best(confidence, _num_by_factor(confidence, decoding.value))
    block[chosen] = tokens[chosen]


def _best(confidence: Tensor, count: int) -> Tensor:
    """The ``count`` most confident, as a boolean mask; lower positions first among equals."""
    chosen = torch.zeros_like(confidence, dtype=torch.bool)
    chosen[confidence.argsort(descending=True, stable=True)[:count]] = True
    return chosen


def _num_by_factor(confidence: Tensor, factor: float) -> int:
    """Fast-dLLM's factor rule: rank j passes while its confidence is at least 1 - factor / (j + 1).

    The first rank always does; when the last one is the first to fail, it is taken as well.
    """
    ranked = sorted((c for c in confidence.tolist() if c > -torch.inf), reverse=True)
    for rank in range(2, len(ranked) + 1):
        if ranked[rank - 1] < 1.0 - factor / (rank + 1):
            return rank if rank == len(ranked) else rank - 1
    return len(ranked)


def _has_ended(
    ids: Tensor, prompt_tokens: int, block_stop: int, mask_id: int, decoding: Decoding
) -> bool:
    """Whether the answer is complete before its length is."""
    if decoding.eos is Eos.IGNORE:
        return False
    answer = ids[prompt_tokens:block_stop].tolist()
    if decoding.eos is Eos.FILL:
        return mask_id not in answer and not decoding.eos_ids.isdisjoint(ids.tolist())
    settled = answer[: answer.index(mask_id)] if mask_id in answer else answer
    return not decoding.eos_ids.isdisjoint(settled)


def _fill_behind_eos(ids: Tensor, eos_ids: frozenset[int]) -> None:
    """DInfer's early stop: everything behind the first EOS, prompt included, becomes that EOS."""
    sequence = ids.tolist()
    for position, token in enumerate(sequence):
        if token in eos_ids:
            ids[position:] = token
            return
