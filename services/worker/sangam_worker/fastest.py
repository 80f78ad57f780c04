"""The fastest of several ways to compute the same, by a measurement on the device at hand.

Decides what counts as the same, and that whatever fails costs itself only. What is tried, and how,
is the callers' business: attention's kernels (``graphs.choice``), products' algorithms
(``models.measured_products``).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog
from torch import Tensor

log = structlog.get_logger(__name__)

Stopwatch = Callable[[Callable[[], None]], float]
"""Seconds that the device takes for what is issued."""

Trial = Callable[[str], tuple[float, Tensor]]
"""Runs one of them by its name: seconds, and answers in float32 that are its own."""

_LARGEST_ERROR = 1 / 16
"""Difference of two ways' answers, of the largest answer. Rounding makes a hundredth; one that
reads something else is off by as much as answers are large."""

_WORTH_WHILE = 0.99
"""Of the first one's time: what gains less may be chance, and the first is the same every time."""


class Fastest(NamedTuple):
    """What was found: its name, and what it takes of the first one's time."""

    name: str
    share: float

    def __str__(self) -> str:
        return self.name if self.share == 1 else f"{self.name} ({self.share:.2f})"


def fastest(what: str, names: Sequence[str], trial: Trial) -> Fastest:
    """The fastest of some by their names.

    The first one says what is right, and its failure is the caller's. Of the others, one that
    fails, or answers otherwise, is left out with a warning.

    Args:
        what: they are, for that warning.
    """
    best, *others = names
    if not others:
        return Fastest(best, 1.0)
    trial(best)  # does not count: a device that had nothing to do is slow at first
    first, wanted = trial(best)
    least = first
    limit = float(_LARGEST_ERROR * wanted.abs().max())
    for name in others:
        try:
            seconds, answers = trial(name)
        except Exception as error:  # noqa: BLE001 - its tiles are too large for the GPU, say
            log.warning(f"{what} left out", name=name, error=str(error)[:300])
            continue
        difference = float((answers - wanted).abs().max())
        if not difference <= limit:  # nor where it is no number
            log.warning(f"{what} left out", name=name, difference=difference)
        elif seconds < least:
            best, least = name, seconds
    if least > _WORTH_WHILE * first:
        return Fastest(names[0], 1.0)
    return Fastest(best, least / first)
