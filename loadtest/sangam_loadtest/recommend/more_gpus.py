"""How many GPUs would do where those given do not.

Decides how a candidate is scaled and which counts are tried: bisection, since more GPUs with the
same shares of roles take more. Called by the command, when nothing holds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from sangam_core.placement import Role
from sangam_loadtest.recommend.candidates import Candidate, Mode
from sangam_loadtest.recommend.trials import Trial
from sangam_loadtest.simulator.system import Split


def by_proportion(num_gpus: int, rate: float, capacity: float) -> int:
    """GPUs for a rate, if capacity grows with their number."""
    return math.ceil(num_gpus * rate / capacity)


def fewest_gpus(
    candidates: Sequence[Candidate],
    num_gpus: int,
    max_gpus: int,
    holding: Callable[[Sequence[Candidate]], Trial | None],
) -> Trial | None:
    """The trial with the fewest GPUs above ``num_gpus`` that holds; None if ``max_gpus`` do not.

    Args:
        candidates: the nearest ones, which do not hold on ``num_gpus``.
        holding: the best of some candidates that hold, if any does.
    """
    fewest = holding(_scaled_all(candidates, max_gpus))
    low, high = num_gpus, max_gpus
    while fewest is not None and high - low > 1:
        middle = (low + high) // 2
        found = holding(_scaled_all(candidates, middle))
        if found is None:
            low = middle
        else:
            fewest, high = found, middle
    return fewest


def _scaled_all(candidates: Sequence[Candidate], num_gpus: int) -> list[Candidate]:
    return list(dict.fromkeys(c for each in candidates for c in scaled(each, num_gpus)))


def scaled(candidate: Candidate, num_gpus: int) -> list[Candidate]:
    """The candidate on another number of GPUs, prefill workers rounded both ways."""
    if candidate.mode is Mode.COLOCATED:
        return [replace(candidate, split=f"{num_gpus}C")]
    split = Split.parse(candidate.split)
    exact = num_gpus * split.counts[Role.PREFILL] / split.num_workers
    letter = "C" if candidate.mode is Mode.HYBRID else "D"
    numbers = sorted({math.floor(exact), math.ceil(exact)})
    return [
        replace(candidate, split=f"{number}P{num_gpus - number}{letter}")
        for number in numbers
        if 0 < number < num_gpus
    ]
