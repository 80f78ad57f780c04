"""Graphs on a CPU: what was captured runs again, on the memory that it was captured with.

What a CUDA graph cannot do is refused: work that was captured may not plan, nor ask how many
sequences there are today, and what it reads has to lie where it lay. Whatever a replay would not
see on a GPU (a tensor that was made anew, a list on the host) is out of date here as well, but for
the torch backend's plan, which is read as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from sangam_worker.graphs.capture import Replay


@dataclass
class EagerCapture:
    """``Capture`` that issues the same code again.

    Attributes:
        taken_bytes: what it says it took. num_captured, num_replayed: calls so far.
    """

    taken_bytes: int = 123
    num_captured: int = 0
    num_replayed: int = 0
    order: list[int] = field(default_factory=list)

    def __call__(self, run: Callable[[], None]) -> Replay:
        number = self.num_captured
        self.num_captured += 1
        run()  # to warm up
        run()  # to be captured

        def replay() -> None:
            self.num_replayed += 1
            self.order.append(number)
            run()

        return replay
