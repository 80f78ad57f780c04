"""Logits to outcomes: proposes on the device, copies once, then applies the rules.

Decides how rows are grouped (rows that are drawn alike are computed together; greedy ones by one
kernel where the device has it) and what crosses from device to host: one tensor an iteration, of a
token and its confidence (or what that is made from) for each row. ``launch`` is the device's half
and waits for nothing, ``Proposals`` the host's. Called by ``engine``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
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
from sangam_worker.sampling.readback import Copied, Readback
from sangam_worker.sampling.rules import choose, committable
from sangam_worker.uploads import sent

Float64s = npt.NDArray[np.float64]

_MEASURES = {
    UnmaskingRule.ENTROPY: Measure.NEGATIVE_ENTROPY,
    UnmaskingRule.TOPK_MARGIN: Measure.MARGIN,
}


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of an iteration that can commit: the passes' committable positions in order.

    Attributes:
        positions: of each pass. groups: numbers of the rows that are drawn alike.
        keys: noise keys, 0 for greedy rows.
    """

    positions: list[tuple[int, ...]]
    groups: dict[Draw, list[int]]
    keys: list[int]


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
        self._readback = Readback()

    def sample(self, logits: Tensor, passes: Sequence[Pass]) -> tuple[PassOutcome, ...]:
        """Decide what commits, and wait for it: ``launch`` and its ``outcomes``."""
        return self.launch(logits, passes).outcomes()

    def launch(self, logits: Tensor, passes: Sequence[Pass]) -> "Proposals":
        """Have the device propose a token for every row that can commit.

        Args:
            logits: ``[rows, vocab]``, a row for each pass's committable positions in order, then
                padding rows.
        """
        rows = self._rows(passes)
        figures = self._figures(logits, rows)
        is_read_once = figures is not None and self._is_read_once(rows)
        return Proposals(
            config=self._config,
            dtype=self._dtype,
            passes=passes,
            rows=rows,
            copied=None if figures is None else self._readback.start(figures),
            is_read_once=is_read_once,
        )

    def _rows(self, passes: Sequence[Pass]) -> _Rows:
        positions = [committable(item, self._config.family) for item in passes]
        groups: dict[Draw, list[int]] = {}
        keys: list[int] = []
        for item, own in zip(passes, positions, strict=True):
            if not own:
                continue
            draw = _draw(item.decoding, self._config.family)
            groups.setdefault(draw, []).extend(range(len(keys), len(keys) + len(own)))
            keys += [0] * len(own) if draw.is_greedy else _row_keys(item, own)
        return _Rows(positions, groups, keys)

    def _is_read_once(self, rows: _Rows) -> bool:
        return self._kernel is not None and any(is_served(draw) for draw in rows.groups)

    def _figures(self, logits: Tensor, rows: _Rows) -> Tensor | None:
        """What the host needs to know, float64, a row each; ``None`` where nothing can commit."""
        if not rows.keys:
            return None
        if self._is_read_once(rows):
            return self._read_once(logits, rows)
        if len(rows.groups) == 1:
            # Nearly every iteration: no need to pick the rows, the padding comes along.
            (draw,) = rows.groups
            proposed = self._propose(logits, draw, rows.keys + [0] * (len(logits) - len(rows.keys)))
        else:
            proposed = torch.empty((len(logits), 2), dtype=torch.float64, device=logits.device)
            for draw in rows.groups:
                self._propose_into(proposed, logits, draw, rows)
        return proposed[: len(rows.keys)]

    def _read_once(self, logits: Tensor, rows: _Rows) -> Tensor:
        """The same with a kernel: it reads every row, and other draws' rows are written over."""
        assert self._kernel is not None
        measures = {draw.measure for draw in rows.groups if is_served(draw)}
        num_columns = max(columns_of(self._config, measure) for measure in measures)
        summary = self._kernel(logits, self._config.mask_id, num_columns)
        for draw in rows.groups:
            if not is_served(draw):
                self._propose_into(summary[:, :2], logits, draw, rows)
        return summary[: len(rows.keys)]

    def _propose_into(self, proposed: Tensor, logits: Tensor, draw: Draw, rows: _Rows) -> None:
        """Write token and confidence of the rows of one draw over ``[rows of the logits, 2]``."""
        own = _padded(rows.groups[draw])
        index = _sent(own, logits.device)
        group = self._propose(logits[index], draw, [rows.keys[row] for row in own])
        proposed.index_copy_(0, index, group)

    def _propose(self, logits: Tensor, draw: Draw, keys: list[int]) -> Tensor:
        """Token and confidence of rows that are drawn alike, float64 ``[rows, 2]``."""
        drawn_keys = _sent([] if draw.is_greedy else keys, logits.device)
        tokens, confidences = propose(logits, draw, drawn_keys, self._config.mask_id)
        return torch.stack((tokens.double(), confidences), 1)


@dataclass(frozen=True, slots=True, eq=False)
class Proposals:
    """What the device was asked to propose, and what is to be made of it."""

    config: ModelConfig
    dtype: torch.dtype
    passes: Sequence[Pass]
    rows: _Rows
    copied: Copied | None
    is_read_once: bool

    def outcomes(self) -> tuple[PassOutcome, ...]:
        """Wait for the copy, then decide what commits.

        A pass with logits that are not numbers has an error instead.
        """
        tokens, confidences = self._read()
        # Looked for once, in their sum: pass by pass only where there is something to be found.
        has_nan = math.isnan(sum(confidences))
        outcomes = []
        start = 0
        for item, own in zip(self.passes, self.rows.positions, strict=True):
            stop = start + len(own)
            its_confidences = confidences[start:stop]
            if has_nan and any(map(math.isnan, its_confidences)):
                error = f"{item.key}: pass {item.step} gave logits that are not numbers"
                outcomes.append(PassOutcome(key=item.key, commits=(), error=error))
            else:
                outcomes.append(self._outcome(item, own, tokens[start:stop], its_confidences))
            start = stop
        return tuple(outcomes)

    def _read(self) -> tuple[list[float], list[float]]:
        """Token and confidence of every row."""
        if self.copied is None:
            return [], []
        # The device waits for the next pass meanwhile: on a few hundred figures numpy takes half of
        # torch's time, and far less where other threads have had the caches.
        figures = self.copied.wait().numpy()
        confidences = self._confidences(figures) if self.is_read_once else figures[:, 1]
        return figures[:, Column.TOKEN].tolist(), confidences.tolist()

    def _confidences(self, figures: Float64s) -> Float64s:
        """What the kernel's figures mean for each row; others' confidences are in their place."""
        groups = self.rows.groups
        if len(groups) == 1:
            (draw,) = groups
            return self._measured(figures, draw)
        confidences = figures[:, Column.PROBABILITY].copy()
        for draw, rows in groups.items():
            if is_served(draw):
                confidences[rows] = self._measured(figures[rows], draw)
        return confidences

    def _measured(self, figures: Float64s, draw: Draw) -> Float64s:
        if self.config.family == "llada":
            return figures[:, Column.PROBABILITY]  # as it is, so without torch
        summary = torch.from_numpy(figures)
        return confidences_of(summary, self.config, draw.measure, self.dtype).numpy()

    def _outcome(
        self, item: Pass, positions: Sequence[int], tokens: list[float], confidences: list[float]
    ) -> PassOutcome:
        family = self.config.family
        threshold = compared_threshold(item.decoding.unmasking.threshold, family, self.dtype)
        chosen, carry = choose(item, family, confidences, threshold)
        commits = [
            Commit(position=positions[i], token=int(tokens[i]), confidence=confidences[i])
            for i in chosen
        ]
        return PassOutcome(key=item.key, commits=tuple(commits), carry=carry)


@lru_cache(maxsize=1024)
def compared_threshold(threshold: float, family: Family, dtype: torch.dtype) -> float:
    """A threshold as confidences meet it: Dream compares in the model's dtype, LLaDA in float64."""
    return threshold if family == "llada" else float(torch.tensor(threshold, dtype=dtype))


def _draw(decoding: Decoding, family: Family) -> Draw:
    # At temperature 0 LLaDA's filters cannot change the argmax, nor its confidence.
    has_filters = family == "dream" or decoding.temperature > 0
    return Draw(
        family=family,
        temperature=decoding.temperature,
        top_p=decoding.top_p if has_filters else 1.0,
        top_k=decoding.top_k if has_filters else 0,
        measure=_MEASURES.get(decoding.unmasking.rule, Measure.PROBABILITY),
    )


def _padded(rows: list[int]) -> list[int]:
    """Rows of a group, padded like every product's (see ``linear``)."""
    return rows + rows[:1] * (padded_rows(len(rows)) - len(rows))


def _sent(values: list[int], device: torch.device) -> Tensor:
    return sent(torch.tensor(values, dtype=torch.int64), device)


def _row_keys(item: Pass, positions: Sequence[int]) -> list[int]:
    seed = item.decoding.seed
    return [
        noise_key("token", seed, item.block_index, item.step, position) for position in positions
    ]
