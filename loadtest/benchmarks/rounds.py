"""Alternating rounds, medians and ratios: what a comparison on a shared machine needs.

Decides the order of measurements and what is made of them; measures nothing itself. Contenders
take turns within a round, so that a slow minute of the machine hits all of them, and ratios are
taken within a round before the median over rounds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Measurement:
    """One contender's run over a workload.

    Attributes:
        num_tokens: answer tokens (without the EOS and what is behind it).
        num_passes: forward passes, counted per request.
        num_iterations: forward computations: passes that ran together count once.
        cpu_seconds: of this process, which other processes on the machine disturb less.
    """

    num_tokens: int
    num_passes: int
    num_iterations: int
    wall_seconds: float
    cpu_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens a second of wall time."""
        return self.num_tokens / self.wall_seconds

    @property
    def tokens_per_cpu_second(self) -> float:
        """Answer tokens a second of CPU time."""
        return self.num_tokens / self.cpu_seconds


Round = Mapping[str, Measurement]
"""One measurement of each contender."""


def run_rounds(
    contenders: Mapping[str, Callable[[], Measurement]],
    num_rounds: int,
    budget_seconds: float,
    report: Callable[[int, str, Measurement], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Round]:
    """Let the contenders take turns; every other round runs backwards.

    Ends after ``num_rounds``, or when another round like the longest one would go beyond the
    budget, but never before one round is complete.
    """
    rounds: list[Round] = []
    started = clock()
    longest_seconds = 0.0
    for index in range(num_rounds):
        round_started = clock()
        if rounds and round_started - started + longest_seconds > budget_seconds:
            break
        names = list(contenders)
        if index % 2:
            names.reverse()
        measured = {}
        for name in names:
            measured[name] = contenders[name]()
            report(index, name, measured[name])
        rounds.append({name: measured[name] for name in contenders})
        longest_seconds = max(longest_seconds, clock() - round_started)
    return rounds


@dataclass(frozen=True, slots=True)
class Summary:
    """A contender's medians over the rounds, and its ratios to the reference contender."""

    name: str
    num_tokens: int
    tokens_per_second: float
    tokens_per_pass: float
    passes_per_iteration: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float
    cpu_ratio: float


def summarise(rounds: Sequence[Round], reference: str) -> list[Summary]:
    """Medians and ratios of every contender."""
    return [_summary(rounds, name, reference) for name in rounds[0]]


def _summary(rounds: Sequence[Round], name: str, reference: str) -> Summary:
    own = [measured[name] for measured in rounds]
    ratios = [
        measured[name].tokens_per_second / measured[reference].tokens_per_second
        for measured in rounds
    ]
    return Summary(
        name=name,
        num_tokens=own[0].num_tokens,
        tokens_per_second=median(item.tokens_per_second for item in own),
        tokens_per_pass=own[0].num_tokens / own[0].num_passes,
        passes_per_iteration=own[0].num_passes / own[0].num_iterations,
        ratio=median(ratios),
        lowest_ratio=min(ratios),
        highest_ratio=max(ratios),
        cpu_ratio=median(
            measured[name].tokens_per_cpu_second / measured[reference].tokens_per_cpu_second
            for measured in rounds
        ),
    )
