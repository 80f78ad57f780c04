"""How a transfer is cut into messages: whole layers that fit one staging slot, or parts of one.

Both ends cut alike, from the same three numbers, so that nothing need be said beside the bytes.
Called by ``nccl``; no torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive pages of a transfer's list, in one layer.

    Attributes:
        start, stop: positions in the list of pages.
        row: where they begin in the staging slot, in pages.
    """

    layer: int
    start: int
    stop: int
    row: int

    @property
    def rows(self) -> slice:
        """Their place in the slot."""
        return slice(self.row, self.row + self.stop - self.start)


Chunk = tuple[Part, ...]
"""What one message carries."""


def pages_in(chunk: Chunk) -> int:
    """Rows of the slot that a chunk fills."""
    last = chunk[-1]
    return last.row + last.stop - last.start


def chunks_of(num_layers: int, num_pages: int, slot_pages: int) -> tuple[Chunk, ...]:
    """A transfer's messages, in order; every page of every layer is in one of them.

    Args:
        slot_pages: pages of one layer that a slot holds, at least 1.
    """
    if num_pages > slot_pages:
        return tuple(
            (Part(layer, start, min(start + slot_pages, num_pages), row=0),)
            for layer in range(num_layers)
            for start in range(0, num_pages, slot_pages)
        )
    together = slot_pages // num_pages
    return tuple(
        tuple(
            Part(layer, 0, num_pages, row=(layer - first) * num_pages)
            for layer in range(first, min(first + together, num_layers))
        )
        for first in range(0, num_layers, together)
    )
