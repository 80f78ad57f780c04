"""Which of a pass's candidates commit: every unmasking rule of both families.

Pure: confidences in, indices out (``dllm-semantics`` section b). Ties: higher confidence, then
lower position. No rule stalls: a pass commits at least one token except where Dream's time
schedule says none yet, and that schedule ends. Called by ``sampler``.
"""

import math
from collections.abc import Sequence

from sangam_core.decoding import UnmaskingRule
from sangam_core.rules import Family
from sangam_worker.plan import Pass
from sangam_worker.sampling.noise import noise_key, uniform
from sangam_worker.sampling.schedules import commit_probabilities, even_count, timed_count


def is_forced_first(item: Pass, family: Family) -> bool:
    """Whether the pass commits its block's first position and nothing else.

    Dream with a cache, pass 0: later passes cannot predict the position, as its row lies before
    the block (Fast-dLLM's rule).
    """
    return family == "dream" and item.step == 0 and bool(item.pages)


def committable(item: Pass, family: Family) -> tuple[int, ...]:
    """Masked positions that can commit in this pass, ascending: only they need a head row."""
    return item.masked[:1] if is_forced_first(item, family) else item.masked


def choose(
    item: Pass, family: Family, confidences: Sequence[float], threshold: float
) -> tuple[list[int], float]:
    """Indices (ascending) of the candidates that commit, and the rule's state after the pass.

    Args:
        confidences: of ``committable(item, family)``, in its order.
        threshold: the rule's threshold as the family compares it (Dream: in the model's dtype).
    """
    if not confidences:
        return [], item.carry
    if is_forced_first(item, family):
        return [0], 0.0
    rule = item.decoding.unmasking.rule
    if rule is UnmaskingRule.CONFIDENCE_THRESHOLD and not item.pages:
        return _choose_budgeted(item, confidences, threshold)
    if rule in (UnmaskingRule.THRESHOLD, UnmaskingRule.CONFIDENCE_THRESHOLD):
        return choose_by_threshold(confidences, threshold), 0.0
    if rule is UnmaskingRule.FACTOR:
        return choose_by_factor(confidences, item.decoding.unmasking.factor), 0.0
    if rule is UnmaskingRule.FIXED:
        return most_confident(confidences, _fixed_count(item, family, len(confidences))), 0.0
    return _choose_timed(item, confidences), 0.0


def most_confident(confidences: Sequence[float], count: int) -> list[int]:
    """Indices (ascending) of the ``count`` best."""
    return sorted(_ranked(confidences)[:count])


def choose_by_threshold(confidences: Sequence[float], threshold: float) -> list[int]:
    """The best one, and every one of at least ``threshold``."""
    best = max(confidences)
    if best < threshold:
        return [confidences.index(best)]
    return [i for i, value in enumerate(confidences) if value >= threshold]


def choose_by_factor(confidences: Sequence[float], factor: float) -> list[int]:
    """Rank j passes while its confidence is at least 1 - factor / (j + 1); rank 1 always.

    Fast-dLLM's quirk is part of the rule: where only the last rank fails, it commits as well.
    """
    ranked = _ranked(confidences)
    count = 1
    while count < len(ranked) and confidences[ranked[count]] >= 1 - factor / (count + 2):
        count += 1
    if count == len(ranked) - 1:
        count += 1
    return sorted(ranked[:count])


def _choose_budgeted(
    item: Pass, confidences: Sequence[float], threshold: float
) -> tuple[list[int], float]:
    """Dream's own ``confidence_threshold``: of the pass's token budget those above the threshold.

    The budget is masks / steps plus what earlier passes rejected (the carry). From the last
    scheduled pass on it is everything that is left; as many passes follow as that takes.
    """
    steps = _steps(item)
    budget = item.initial_masks // steps + int(item.carry)
    if item.step >= steps - 1:
        budget = len(confidences)
    ranked = _ranked(confidences)[: max(1, budget)]
    chosen = [i for rank, i in enumerate(ranked) if rank == 0 or confidences[i] >= threshold]
    return sorted(chosen), float(len(ranked) - len(chosen))


def _choose_timed(item: Pass, confidences: Sequence[float]) -> list[int]:
    """Dream's time schedule: ranked, drawn by rank (``alg_temp``), or each by itself (origin)."""
    unmasking, steps = item.decoding.unmasking, _steps(item)
    if unmasking.rule is UnmaskingRule.ORIGIN:
        if item.step >= steps - 1:
            return list(range(len(confidences)))
        limit = commit_probabilities(steps, unmasking.eps)[item.step]
        return [i for i, value in enumerate(_position_noise(item)) if value < limit]
    count = timed_count(len(confidences), steps, item.step, unmasking.eps)
    if not unmasking.alg_temp:
        return most_confident(confidences, count)
    # The best of (score + Gumbel noise) are a draw without replacement from the scores' softmax.
    noisy = [
        value / unmasking.alg_temp - math.log(-math.log(noise))
        for value, noise in zip(confidences, _position_noise(item), strict=True)
    ]
    return most_confident(noisy, count)


def _fixed_count(item: Pass, family: Family, num_left: int) -> int:
    """The even schedule; on cached Dream over the passes and masks behind the forced first."""
    steps, step, initial_masks = _steps(item), item.step, item.initial_masks
    if family == "dream" and item.pages:
        steps, step, initial_masks = max(1, steps - 1), step - 1, initial_masks - 1
    if step >= steps - 1:
        return num_left
    return max(1, even_count(initial_masks, steps, step))


def _position_noise(item: Pass) -> list[float]:
    seed = item.decoding.seed
    return [
        uniform(noise_key("position", seed, item.block_index, item.step, position))
        for position in item.masked
    ]


def _steps(item: Pass) -> int:
    return item.decoding.unmasking.steps or len(item.block)


def _ranked(confidences: Sequence[float]) -> list[int]:
    # Stable in reverse, too: of equals the lower position comes first.
    return sorted(range(len(confidences)), key=confidences.__getitem__, reverse=True)
