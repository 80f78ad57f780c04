"""The contract between scheduler and engine: a ``Plan`` goes down, an ``Outcome`` comes up.

Both are frozen and complete at birth. No torch, no clock: the simulator reads the same plans. What
there is one of for each block and iteration is a tuple: the device waits while they are made, and
a frozen dataclass takes three times as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sangam_core.decoding import Commit, Decoding
from sangam_core.wire import BlockKey


class Pass(NamedTuple):
    """One block's share of an iteration.

    Attributes:
        positions: rows fed, ascending absolute positions; tokens: their ids.
        sees: number of leading positions whose K/V the rows attend to.
        total_tokens: length of the sequence.
        pages: page table of the sequence; empty where the strategy keeps no KV (the rows then
            attend to themselves only).
        block: absolute positions of the current block.
        block_index: its number. step: the pass's number within it, 0 for the prefill.
        masked: positions of the block that are still masks. Empty when the pass's predictions do
            not count (a repeated prefill): no LM head, no commits.
        initial_masks: masks in the block at its start. carry: the rule's state before the pass.
        is_whole_sequence: admitted by the budget; otherwise a decode.
    """

    key: BlockKey
    positions: Sequence[int]
    tokens: Sequence[int]
    sees: int
    total_tokens: int
    pages: tuple[int, ...]
    block: range
    block_index: int
    step: int
    masked: tuple[int, ...]
    initial_masks: int
    carry: float
    decoding: Decoding
    is_whole_sequence: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One iteration: decodes first, then the admitted whole-sequence passes."""

    iteration: int
    passes: tuple[Pass, ...]
    num_decode_tokens: int
    num_prefill_tokens: int


class PassOutcome(NamedTuple):
    """What a pass committed (ascending positions), and the rule's state after it.

    ``error`` says why this pass alone is of no use (its logits are not numbers); its block is
    lost, the others of the iteration are not.
    """

    key: BlockKey
    commits: tuple[Commit, ...]
    carry: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcomes of a plan's passes, in the plan's order."""

    iteration: int
    passes: tuple[PassOutcome, ...]


class Launched(Protocol):
    """An iteration that the device works on.

    Attributes:
        device_seconds: from the device's first operation to the end of the copy, once ``outcome``
            has returned. ``None`` on a CPU, where host and device are one.
    """

    @property
    def device_seconds(self) -> float | None:
        """See above."""
        ...

    def outcome(self) -> Outcome:
        """Wait for the device's one copy to the host, then apply the rules. To be called once."""
        ...
