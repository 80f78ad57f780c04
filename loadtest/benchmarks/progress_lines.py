"""How far a benchmark is, on standard error, where that is no terminal: a line now and then.

Decides how often and how it reads. On a terminal a bar does it better. Called by ``pass_costs``.
"""

import sys
import time
from collections.abc import Callable

LINE_SECONDS = 10.0


class ProgressLines:
    """Writes at the first and the last call, and every ten seconds in between.

    Args:
        name: what is counted. clock: seconds, for tests.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._started = clock()
        self._due: float | None = None

    def __call__(self, num_done: int, num_total: int) -> None:
        """Take in how many are done, of how many as far as is known."""
        now = self._clock()
        if self._due is not None and now < self._due and num_done < num_total:
            return
        self._due = now + LINE_SECONDS
        seconds = now - self._started
        sys.stderr.write(f"{self._name}: {num_done} of {num_total}, {seconds:.0f} s\n")
        sys.stderr.flush()
