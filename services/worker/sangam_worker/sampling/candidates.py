"""For every row that can commit: the token it proposes, and how sure the model is.

Decides tokens and confidences (``dllm-semantics`` section b); which of them commit is ``rules``'
business. Row by row: nothing here mixes rows. The mask token is never a candidate, but it keeps
its share of the probability mass, so that confidences are the reference's. Called by ``sampler``.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from sangam_core.rules import Family
from sangam_worker.sampling.noise import gumbel


class Measure(StrEnum):
    """What ranks a candidate."""

    PROBABILITY = "probability"
    MARGIN = "margin"
    """The best candidate's probability less that of the best other entry (Dream's p1 - p2),
    whichever was drawn."""
    NEGATIVE_ENTROPY = "negative_entropy"


@dataclass(frozen=True, slots=True)
class Draw:
    """How rows are turned into candidates; rows with equal draws are computed together."""

    family: Family
    temperature: float
    top_p: float
    top_k: int
    measure: Measure

    @property
    def is_greedy(self) -> bool:
        """Whether no noise is needed."""
        return self.temperature == 0.0


ROWS_AT_ONCE = 256
"""Rows whose float64 copies are alive together: 46 bytes an entry of the vocabulary with noise, and
what a sort needs, 6 to 8 MB a row for LLaDA-8B. A whole number of ``MIN_ROWS``."""


def propose(logits: Tensor, draw: Draw, keys: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    """Tokens (int64) and confidences (float64) of rows.

    Args:
        logits: ``[rows, vocab]``. keys: noise keys, int64 ``[rows]``; unused when greedy.
    """
    propose_some = _propose_llada if draw.family == "llada" else _propose_dream
    if len(logits) <= ROWS_AT_ONCE:
        return propose_some(logits, draw, keys, mask_id)
    starts = range(0, len(logits), ROWS_AT_ONCE)
    rows = [slice(start, start + ROWS_AT_ONCE) for start in starts]
    parts = [propose_some(logits[each], draw, keys[each], mask_id) for each in rows]
    tokens, confidences = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(confidences)


def _propose_llada(logits: Tensor, draw: Draw, keys: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    """Gumbel-max at the temperature; the confidence is the un-noised float64 softmax.

    argmax of exp(logit) / (-ln u)^T in the published code; in log space it cannot overflow.
    """
    allowed = _without_mask(logits, mask_id)
    if draw.is_greedy:
        tokens = allowed.argmax(-1)
    else:
        tempered = _filtered(allowed.double() / draw.temperature, draw)
        tokens = (tempered + gumbel(keys, logits.shape[1])).argmax(-1)
    masses = logits.double()
    masses.sub_(masses.amax(-1, keepdim=True)).exp_()
    return tokens, _at(masses, tokens) / masses.sum(-1)


def _propose_dream(logits: Tensor, draw: Draw, keys: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    """Softmax in the model's dtype of the tempered, filtered logits; categorical draw."""
    scaled = logits if draw.is_greedy else logits / draw.temperature
    allowed = _without_mask(scaled, mask_id)
    if draw.top_p < 1.0 or draw.top_k > 0:
        # Filters see no mask token: a nucleus of the mask token alone would leave no candidate.
        scaled = allowed = _filtered(allowed, draw)
    probabilities = torch.softmax(scaled, -1)
    if draw.is_greedy:
        tokens = allowed.argmax(-1)
    else:
        tokens = (allowed.double() + gumbel(keys, logits.shape[1])).argmax(-1)
    measured = allowed.argmax(-1) if draw.measure is Measure.MARGIN else tokens
    return tokens, _measured(probabilities, measured, draw.measure).double()


def _measured(probabilities: Tensor, tokens: Tensor, measure: Measure) -> Tensor:
    if measure is Measure.NEGATIVE_ENTROPY:
        return (probabilities * torch.log(probabilities + 1e-10)).sum(-1)
    chosen = _at(probabilities, tokens)
    if measure is Measure.MARGIN:
        others = probabilities.scatter(-1, tokens[:, None], -1.0)
        return chosen - others.amax(-1)
    return chosen


def _filtered(logits: Tensor, draw: Draw) -> Tensor:
    """Nucleus, then top-k: everything else gets minus infinity.

    The nucleus keeps the token that crosses the limit. Ties at the k-th place all stay.
    """
    if draw.top_p < 1.0:
        ordered, entries = logits.sort(stable=True, dim=-1, descending=True)
        mass_before = torch.softmax(ordered, -1).cumsum(-1).roll(1, -1)
        mass_before[:, 0] = 0.0
        removed = torch.zeros_like(logits, dtype=torch.bool)
        removed.scatter_(-1, entries, mass_before > draw.top_p)
        logits = logits.masked_fill(removed, -torch.inf)
    if 0 < draw.top_k < logits.shape[1]:
        limit = logits.topk(draw.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < limit, -torch.inf)
    return logits


def _without_mask(logits: Tensor, mask_id: int) -> Tensor:
    allowed = logits.clone()
    allowed[:, mask_id] = -torch.inf
    return allowed


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(-1, tokens[:, None])[:, 0]
