"""How many masks each pass commits: drawn block by block from a distribution, measured or made up.

Decides the numbers of a block's passes; the engine stand-in (``worker``) commits them, and which
positions those are does not matter to time. Called by ``driver`` once a block.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from sangam_core.errors import ConfigurationError
from sangam_loadtest.records import RequestRecord


class CommitCounts(Protocol):
    """A distribution of the commits of a block's passes."""

    def draw(self, rng: random.Random, num_masks: int) -> Sequence[int]:
        """Tokens committed by each pass of a block, the prefill's first; at least one each, and
        ``num_masks`` in all."""
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

    def draw(self, rng: random.Random, num_masks: int) -> Sequence[int]:
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
    """Whole blocks drawn from those of a real run.

    A recorded block of another length is stretched or cut to the masks at hand.

    Attributes:
        blocks: commits by pass of every recorded block.
    """

    blocks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> "RecordedCommits":
        """The blocks of a run's records.

        Raises:
            ConfigurationError: no record tells its commits, or one tells of an empty pass only.
        """
        blocks = [
            tuple(count for count in block if count > 0)
            for record in records
            if record.error is None
            for block in record.commit_counts
        ]
        known = tuple(block for block in blocks if block)
        if not known:
            raise ConfigurationError(
                "no record has commit_counts: they come from `sangam loadtest run` with timings "
                "against this version's routers"
            )
        return cls(known)

    @property
    def mean(self) -> float:
        """Tokens a pass."""
        return sum(map(sum, self.blocks)) / sum(map(len, self.blocks))

    def draw(self, rng: random.Random, num_masks: int) -> Sequence[int]:
        """See ``CommitCounts``."""
        block = rng.choice(self.blocks)
        total = sum(block)
        if total == num_masks:
            return block
        ends = [round(end * num_masks / total) for end in accumulate(block)]
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return [count for count in counts if count > 0]


DEFAULT_COMMITS = {"llada-8b": 2.0, "dream-7b": 1.6}
"""Mean tokens a pass where nothing was measured (confidence threshold 0.9, blocks of 32)."""
