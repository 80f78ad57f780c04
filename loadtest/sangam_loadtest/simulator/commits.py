"""How many masks each pass commits: drawn block by block from a distribution, measured or made up.

Decides the numbers of a block's passes; the engine stand-in (``worker``) commits them, and which
positions those are does not matter to time. Called by ``driver`` once a block.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from sangam_core.errors import ConfigurationError
from sangam_loadtest.records import RequestRecord

_ENOUGH_BLOCKS = 20
"""So many recorded blocks of a number are a distribution of their own."""


class CommitCounts(Protocol):
    """A distribution of the commits of a block's passes."""

    def draw(self, rng: random.Random, num_masks: int, block: int) -> Sequence[int]:
        """Tokens committed by each pass of a block, the prefill's first; at least one each, and
        ``num_masks`` in all.

        Args:
            block: its number in the answer, from 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class GeometricCommits:
    """One and a geometric number of commits a pass, where nothing but the mean is known.

    Confidence thresholds commit every position over the threshold and at least one; that is what
    this imitates where no measurement is at hand.

    Attributes:
        mean: tokens a pass over a whole answer (a block's last pass finds fewer masks than it
            could commit, so single passes are drawn from a somewhat larger mean; see
            ``calibrated``).
        pass_mean: mean of a pass that finds enough masks.
    """

    mean: float
    pass_mean: float

    @classmethod
    def calibrated(cls, mean: float, block_length: int = 32) -> "GeometricCommits":
        """The distribution whose blocks take ``block_length / mean`` passes on average.

        Raises:
            ConfigurationError: a mean below 1, or so large that most blocks take one pass.
        """
        if not 1 <= mean <= block_length / 2:
            raise ConfigurationError(
                f"commits a pass must be in [1, {block_length / 2:g}], not {mean:g}"
            )
        # A block of n masks takes 1 + (n - 1) / pass_mean passes: every position but the last ends
        # a pass with probability 1 / pass_mean, the last one for certain.
        return cls(mean, (block_length - 1) / (block_length / mean - 1))

    def draw(self, rng: random.Random, num_masks: int, block: int) -> Sequence[int]:
        """See ``CommitCounts``."""
        counts = []
        going_on = 1 - 1 / self.pass_mean
        left = num_masks
        while left:
            taken = 1
            while taken < left and rng.random() < going_on:
                taken += 1
            counts.append(taken)
            left -= taken
        return counts


@dataclass(frozen=True, slots=True)
class RecordedCommits:
    """Whole blocks drawn from those of a real run, each from those of its place in the answer.

    First blocks may take many passes and those behind an end token one (``ignore_eos``), and how
    long answers are decides how many there are of which. A recorded block of another length is
    stretched or cut to the masks at hand.

    Attributes:
        blocks: for each number of a block, commits by pass of the recorded ones; the last entry
            stands for all later numbers too.
    """

    blocks: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> "RecordedCommits":
        """The blocks of a run's records. Numbers with few of them are put together.

        Raises:
            ConfigurationError: no record tells its commits, or one tells of an empty pass only.
        """
        by_number: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for record in records:
            for number, block in enumerate(record.commit_counts):
                counts = tuple(count for count in block if count > 0)
                if counts and record.error is None:
                    by_number[number].append(counts)
        if not by_number:
            raise ConfigurationError(
                "no record has commit_counts: they come from `sangam loadtest run` with timings "
                "against this version's routers"
            )
        grouped: list[list[tuple[int, ...]]] = []
        for number in sorted(by_number):
            if not grouped or len(by_number[number]) >= _ENOUGH_BLOCKS:
                grouped.append(by_number[number])
            else:
                grouped[-1] += by_number[number]
        return cls(tuple(tuple(group) for group in grouped))

    @property
    def mean(self) -> float:
        """Tokens a pass."""
        every = [block for group in self.blocks for block in group]
        return sum(map(sum, every)) / sum(map(len, every))

    def draw(self, rng: random.Random, num_masks: int, block: int) -> Sequence[int]:
        """See ``CommitCounts``."""
        counts = rng.choice(self.blocks[min(block, len(self.blocks) - 1)])
        total = sum(counts)
        if total == num_masks:
            return counts
        ends = [round(end * num_masks / total) for end in accumulate(counts)]
        stretched = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return [count for count in stretched if count > 0]


DEFAULT_COMMITS = {"llada-8b": 1.7, "dream-7b": 1.6}
"""Mean tokens a pass where nothing was measured (confidence threshold 0.9, blocks of 32)."""
