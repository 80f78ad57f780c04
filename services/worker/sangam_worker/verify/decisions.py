"""Which differences from the float32 decisions a number format explains.

From how far a row's logits may be off (``rounding``) follows how far confidences may be, and from
that whether another token, or another set of committed positions, is excused: only if the golden
run itself decided by less. Pure; called by ``forcing``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sangam_core.decoding import UnmaskingRule
from sangam_core.rules import Family
from sangam_worker.plan import Pass
from sangam_worker.sampling.candidates import Measure
from sangam_worker.sampling.rules import choose
from sangam_worker.sampling.sampler import compared_threshold

SIGMAS = 5.0
"""A logit is off by more than so many standard deviations in one of two million cases."""

SAMPLER_ERROR = 2.0**-20
"""Of confidences where exponentials and sums over the vocabulary are float32."""

_MEASURES = {
    UnmaskingRule.ENTROPY: Measure.NEGATIVE_ENTROPY,
    UnmaskingRule.TOPK_MARGIN: Measure.MARGIN,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one pass: how far apart two logits, and confidences, may be from the float32 ones.

    Attributes:
        gaps: by candidate, of the difference of two logits of its row.
        confidences: by candidate. thresholds: of a confidence against the rule's threshold, on
            top of that (Dream compares with a rounded one).
    """

    gaps: tuple[float, ...]
    confidences: tuple[float, ...]
    thresholds: float


def limits_of(
    item: Pass, family: Family, rows: Tensor, scales: Tensor, mask_id: int, dtype: torch.dtype
) -> Limits:
    """The limits of a pass.

    Args:
        rows: the float32 model's logits of the candidates, float64 ``[candidates, vocab]``.
        scales: standard deviation of a logit by row; zeros where nothing may differ.
        dtype: of the engine under test.
    """
    if not scales.any():
        nothing = (0.0,) * len(rows)
        return Limits(nothing, nothing, 0.0)
    gaps = SIGMAS * math.sqrt(2) * scales
    rule = item.decoding.unmasking.rule
    confidences = _confidence_limits(rows, gaps, mask_id, _MEASURES.get(rule), family, dtype)
    threshold = item.decoding.unmasking.threshold
    rounded = abs(compared_threshold(threshold, family, dtype) - threshold)
    return Limits(tuple(gaps.tolist()), tuple((confidences + SAMPLER_ERROR).tolist()), rounded)


def _confidence_limits(
    rows: Tensor,
    gaps: Tensor,
    mask_id: int,
    measure: Measure | None,
    family: Family,
    dtype: torch.dtype,
) -> Tensor:
    """From the log-odds of a token, which are off as the difference of two logits is."""
    logarithms = rows.log_softmax(-1)
    probabilities = logarithms.exp()
    # Dream's softmax, and what is made of it, is in the model's dtype.
    unit = torch.finfo(dtype).eps / 2 if family == "dream" else 0.0
    if measure is Measure.NEGATIVE_ENTROPY:
        weighted = (probabilities * logarithms).nan_to_num(0.0)
        entropy = -weighted.sum(-1)
        slopes = (weighted + probabilities * entropy[:, None]).abs().sum(-1)
        moved = (gaps * gaps.exp() * slopes).clamp(max=math.log(rows.shape[1]))
        return moved + unit * (4 * entropy + 1)
    candidates = probabilities.clone()
    candidates[:, mask_id] = -1.0
    best, second = candidates.topk(2, -1).values.unbind(-1)
    if measure is Measure.MARGIN:
        return _moved(best, gaps) + _moved(second, gaps) + 2 * unit * (best + second)
    return _moved(best, gaps) + unit * best


def _moved(probabilities: Tensor, gaps: Tensor) -> Tensor:
    """By how much a probability moves at most when its log-odds do by ``gaps``."""
    odds = torch.logit(probabilities.clamp(0.0, 1.0))
    upwards = torch.sigmoid(odds + gaps) - probabilities
    return torch.maximum(upwards, probabilities - torch.sigmoid(odds - gaps))


def is_choice_explained(
    item: Pass, family: Family, confidences: Sequence[float], limits: Limits, index: int
) -> bool:
    """Whether the rule decides otherwise about a candidate for confidences within the limits.

    Those tried speak most against the decision: the candidate's own moved against it and all
    others for it (ranks), or all moved against it (thresholds, and the factor rule, where one
    failure ends the chain), one other perhaps left out, which then may take the first place.

    Args:
        confidences: of the float32 model, by candidate.
    """
    threshold = item.decoding.unmasking.threshold

    def chosen(moved: Sequence[float]) -> bool:
        return index in choose(item, family, moved, threshold)[0]

    decision = chosen(confidences)
    against = -1.0 if decision else 1.0
    widths = [limit + limits.thresholds for limit in limits.confidences]
    against_it, for_it = (
        [value + sign * width for value, width in zip(confidences, widths, strict=True)]
        for sign in (against, -against)
    )
    apart = [*for_it[:index], against_it[index], *for_it[index + 1 :]]
    but_one = (
        [*against_it[:other], for_it[other], *against_it[other + 1 :]]
        for other in range(len(confidences))
        if other != index
    )
    return any(chosen(moved) != decision for moved in (against_it, apart, *but_one))
