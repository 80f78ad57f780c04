"""Logits to outcomes: proposes on the device, copies once, then applies the rules.

Decides how rows are grouped (rows that are drawn alike are computed together; greedy ones by one
kernel where the device has it) and what crosses from device to host: one tensor an iteration, of a
token and its confidence (or what that is made from) for each row. Called by ``engine``.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sangam_core.decoding import Commit, Decoding, UnmaskingRule
from sangam_core.rules import Family
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.linear import padded_rows
from sangam_worker.plan import Pass, PassOutcome
from sangam_worker.sampling.candidates import Draw, Measure, propose
from sangam_worker.sampling.greedy import (
    Column,
    GreedyKernel,
    columns_of,
    confidences_of,
    is_served,
)
from sangam_worker.sampling.noise import noise_key
from sangam_worker.sampling.rules import choose, committable

_MEASURES = {
    UnmaskingRule.ENTROPY: Measure.NEGATIVE_ENTROPY,
    UnmaskingRule.TOPK_MARGIN: Measure.MARGIN,
}


class Sampler:
    """Samples for one model.

    Args:
        kernel: what reads greedy rows; without one torch's operators do.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, kernel: GreedyKernel | None = None
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._kernel = kernel

    def sample(self, logits: Tensor, passes: Sequence[Pass]) -> tuple[PassOutcome, ...]:
        """Decide what commits. A pass with logits that are not numbers has an error instead.

        Args:
            logits: ``[rows, vocab]``: for each pass its committable positions in order, then
                padding rows.
        """
        positions = [committable(item, self._config.family) for item in passes]
        tokens, confidences = self._proposals(logits, passes, positions)
        outcomes = []
        start = 0
        for item, own in zip(passes, positions, strict=True):
            stop = start + len(own)
            outcomes.append(self._outcome(item, own, tokens[start:stop], confidences[start:stop]))
            start = stop
        return tuple(outcomes)

    def _outcome(
        self, item: Pass, positions: Sequence[int], tokens: list[int], confidences: list[float]
    ) -> PassOutcome:
        if any(math.isnan(value) for value in confidences):
            error = f"{item.key}: pass {item.step} gave logits that are not numbers"
            return PassOutcome(key=item.key, commits=(), error=error)
        threshold = compared_threshold(
            item.decoding.unmasking.threshold, self._config.family, self._dtype
        )
        chosen, carry = choose(item, self._config.family, confidences, threshold)
        commits = tuple(
            Commit(position=positions[i], token=tokens[i], confidence=confidences[i])
            for i in chosen
        )
        return PassOutcome(key=item.key, commits=commits, carry=carry)

    def _proposals(
        self, logits: Tensor, passes: Sequence[Pass], positions: Sequence[tuple[int, ...]]
    ) -> tuple[list[int], list[float]]:
        groups: dict[Draw, list[int]] = {}
        keys: list[int] = []
        for item, own in zip(passes, positions, strict=True):
            draw = self._draw(item.decoding)
            groups.setdefault(draw, []).extend(range(len(keys), len(keys) + len(own)))
            keys += [0] * len(own) if draw.is_greedy else _row_keys(item, own)
        if not keys:
            return [], []
        if self._kernel is not None and any(is_served(draw) for draw in groups):
            return self._read_once(self._kernel, logits, groups, keys)
        if len(groups) == 1:
            # Nearly every iteration: no need to pick the rows, the padding comes along.
            (draw,) = groups
            proposed = self._propose(logits, draw, keys + [0] * (len(logits) - len(keys)))
        else:
            proposed = torch.empty((len(logits), 2), dtype=torch.float64, device=logits.device)
            for draw, rows in groups.items():
                self._propose_into(proposed, logits, draw, rows, keys)
        tokens, confidences = proposed[: len(keys)].T.tolist()
        return [int(token) for token in tokens], confidences

    def _read_once(
        self, kernel: GreedyKernel, logits: Tensor, groups: dict[Draw, list[int]], keys: list[int]
    ) -> tuple[list[int], list[float]]:
        """The same with a kernel: it reads every row, and other draws' rows are written over."""
        measures = {draw.measure for draw in groups if is_served(draw)}
        num_columns = max(columns_of(self._config, measure) for measure in measures)
        summary = kernel(logits, self._config.mask_id, num_columns)
        for draw, rows in groups.items():
            if not is_served(draw):
                self._propose_into(summary[:, :2], logits, draw, rows, keys)
        # Waits for the device, once an iteration; what follows is a few numbers a row.
        summary = summary[: len(keys)].cpu()
        confidences = summary[:, Column.PROBABILITY].clone()
        for draw, rows in groups.items():
            if is_served(draw):
                own = rows if len(groups) > 1 else slice(None)
                figures = summary[own]
                confidences[own] = confidences_of(figures, self._config, draw.measure, self._dtype)
        return summary[:, Column.TOKEN].long().tolist(), confidences.tolist()

    def _propose_into(
        self, proposed: Tensor, logits: Tensor, draw: Draw, rows: list[int], keys: list[int]
    ) -> None:
        """Write token and confidence of some rows over ``[rows, 2]``."""
        if not rows:
            return
        # A group is padded like every product (see ``linear``).
        padded = rows + rows[:1] * (padded_rows(len(rows)) - len(rows))
        index = _sent(padded, logits.device)
        group = self._propose(logits[index], draw, [keys[row] for row in padded])
        proposed.index_copy_(0, index, group)

    def _propose(self, logits: Tensor, draw: Draw, keys: list[int]) -> Tensor:
        """Token and confidence of rows that are drawn alike, float64 ``[rows, 2]``."""
        drawn_keys = _sent([] if draw.is_greedy else keys, logits.device)
        tokens, confidences = propose(logits, draw, drawn_keys, self._config.mask_id)
        return torch.stack((tokens.double(), confidences), 1)

    def _draw(self, decoding: Decoding) -> Draw:
        family = self._config.family
        # At temperature 0 LLaDA's filters cannot change the argmax, nor its confidence.
        has_filters = family == "dream" or decoding.temperature > 0
        return Draw(
            family=family,
            temperature=decoding.temperature,
            top_p=decoding.top_p if has_filters else 1.0,
            top_k=decoding.top_k if has_filters else 0,
            measure=_MEASURES.get(decoding.unmasking.rule, Measure.PROBABILITY),
        )


def compared_threshold(threshold: float, family: Family, dtype: torch.dtype) -> float:
    """A threshold as confidences meet it: Dream compares in the model's dtype, LLaDA in float64."""
    return threshold if family == "llada" else float(torch.tensor(threshold, dtype=dtype))


def _sent(values: list[int], device: torch.device) -> Tensor:
    """A tensor on the device, without waiting for what the device is doing (as a plain copy of
    pageable memory does; the driver takes its own copy of this one before it returns)."""
    return torch.tensor(values).to(device, non_blocking=True)


def _row_keys(item: Pass, positions: Sequence[int]) -> list[int]:
    seed = item.decoding.seed
    return [
        noise_key("token", seed, item.block_index, item.step, position) for position in positions
    ]
