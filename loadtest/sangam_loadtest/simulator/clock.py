"""Virtual time: what happens next, and when. Knows nothing of what happens.

Called by everything in the simulator; ``simulate`` turns it.
"""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class VirtualClock:
    """A queue of events. Those due at one moment happen in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, seconds: float, happen: Callable[[], None]) -> None:
        """Let something happen at a time (seconds), not before now."""
        assert seconds >= self.now, "time goes forward"
        heappush(self._events, (seconds, next(self._numbers), happen))

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Let something happen after so many seconds."""
        self.at(self.now + seconds, happen)

    def turn(self, until: float = math.inf) -> bool:
        """Let the next event happen; False when there is none up to a time (seconds)."""
        if not self._events or self._events[0][0] > until:
            return False
        self.now, _, happen = heappop(self._events)
        happen()
        return True
