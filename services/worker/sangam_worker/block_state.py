"""One block on a worker: its ids as they fill, its stage, its pages.

Owned and changed by the scheduler only; ``block_state_from`` turns the wire's ``BlockStart`` into
it. No torch, no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sangam_core.decoding import Commit, Decoding, EosRule, Resume
from sangam_core.errors import InvalidRequest
from sangam_core.geometry import Geometry
from sangam_core.wire import BlockKey, BlockStart
from sangam_worker.strategies import CachingStrategy, Rows, strategy_named


class Stage(StrEnum):
    """Where a block stands on this worker."""

    WAITING = "waiting"
    """A whole-sequence pass waits for the token budget."""
    ADMITTED = "admitted"
    """Its whole-sequence pass runs in the current iteration."""
    DECODING = "decoding"
    """Takes part in every iteration."""
    HOLDING = "holding"
    """Prefilled; its KV waits for a decode worker."""
    ARRIVING = "arriving"
    """Pages reserved; its KV is on its way here."""
    PARKED = "parked"
    """Its KV is here; it joins the decodes when older prefills have had their share."""


@dataclass(slots=True, eq=False)
class BlockState:
    """A block's state between passes.

    Attributes:
        ids: the whole sequence.
        block: absolute positions of the current block.
        order: position in every queue: request arrival, then id.
    """

    key: BlockKey
    arrival_seconds: float
    geometry: Geometry
    decoding: Decoding
    strategy: CachingStrategy
    ids: list[int]
    initial_masks: int
    step: int = 0
    carry: float = 0.0
    hands_over: bool = False
    resume: Resume | None = None
    stage: Stage = Stage.WAITING
    pages: tuple[int, ...] = ()
    is_cancelled: bool = False
    num_passes_here: int = 0
    eos_ids: frozenset[int] = field(default=frozenset())
    block: range = field(init=False)
    order: tuple[float, str, int, int] = field(init=False)
    _masked: Sequence[int] = field(init=False)
    _rows: Rows = field(init=False)
    _rows_step: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        key = self.key
        self._masked = self.block = self.geometry.block_range(key.block)
        self.order = (self.arrival_seconds, key.request_id, key.block, key.attempt)

    @property
    def num_pages(self) -> int:
        """Pages the block holds while it runs here."""
        return self.geometry.num_pages if self.strategy.keeps_kv else 0

    @property
    def is_repeat(self) -> bool:
        """Whether the next pass only rebuilds the KV of a block that goes on elsewhere."""
        return self.resume is not None

    def next_rows(self) -> Rows:
        """Rows of the next pass (a repeated prefill is pass 0 again)."""
        step = 0 if self.resume is not None else min(self.step, self.strategy.steady_step)
        if self._rows_step != step:
            self._rows = self.strategy.rows(self.geometry, self.key.block, step)
            self._rows_step = step
        return self._rows

    def masks(self, mask_id: int) -> tuple[int, ...]:
        """Positions of the block that are masks, ascending."""
        # What is none any more never is one again, so fewer and fewer have to be looked at.
        ids = self.ids
        masked = self._masked = tuple([each for each in self._masked if ids[each] == mask_id])
        return masked

    def overlay(self, commits: tuple[Commit, ...]) -> None:
        """Write committed tokens into the sequence."""
        for commit in commits:
            self.ids[commit.position] = commit.token

    def resume_now(self) -> None:
        """Go on where the lost placement stopped."""
        assert self.resume is not None
        self.overlay(self.resume.commits)
        self.step, self.carry = self.resume.step, self.resume.carry
        self.resume = None


def block_state_from(start: BlockStart, mask_id: int, vocab_size: int) -> BlockState:
    """Check a ``BlockStart`` and build the state it describes.

    Raises:
        InvalidRequest: ids of the wrong length or out of the vocabulary, a block without masks,
            commits outside the block, an unknown strategy, or one that cannot be handed over.
    """
    geometry = start.geometry.geometry()
    if start.key.block >= geometry.num_blocks:
        raise InvalidRequest(
            f"key.block {start.key.block} is not in 0..{geometry.num_blocks - 1}", param="key"
        )
    if len(start.ids) != geometry.total_tokens:
        raise InvalidRequest(
            f"ids: {len(start.ids)} tokens, but the geometry says {geometry.total_tokens}",
            param="ids",
        )
    if min(start.ids) < 0 or max(start.ids) >= vocab_size:
        raise InvalidRequest(f"ids must be in 0..{vocab_size - 1}", param="ids")
    strategy = strategy_named(start.decoding.cache)
    if not strategy.keeps_kv and (start.hands_over or start.source is not None):
        raise InvalidRequest(
            f"cache {strategy.name!r} keeps no KV, so it cannot be handed over", param="cache"
        )
    if start.hands_over and start.source is not None:
        raise InvalidRequest("hands_over and source exclude each other", param="hands_over")
    block = geometry.block_range(start.key.block)
    num_masks = sum(start.ids[position] == mask_id for position in block)
    if num_masks == 0:
        raise InvalidRequest("ids: the block has no mask left", param="ids")
    state = BlockState(
        key=start.key,
        arrival_seconds=start.arrival_seconds,
        geometry=geometry,
        decoding=start.decoding,
        strategy=strategy,
        ids=list(start.ids),
        initial_masks=num_masks,
        hands_over=start.hands_over,
        eos_ids=frozenset(
            () if start.decoding.eos_rule is EosRule.IGNORE else start.decoding.eos_ids
        ),
    )
    if start.resume is not None:
        _check_resume(start.resume, state.block, vocab_size)
    _take_up(state, start.resume, moved=start.source is not None)
    return state


def _check_resume(resume: Resume, block: range, vocab_size: int) -> None:
    if any(commit.position not in block for commit in resume.commits):
        raise InvalidRequest("resume.commits must lie in the block", param="resume")
    if any(not 0 <= commit.token < vocab_size for commit in resume.commits):
        raise InvalidRequest(
            f"resume.commits must hold tokens in 0..{vocab_size - 1}", param="resume"
        )
    if resume.initial_masks > len(block):
        raise InvalidRequest(
            f"resume.initial_masks {resume.initial_masks} is more than the block's {len(block)} "
            "positions",
            param="resume",
        )
    if not 0 <= resume.carry <= len(block):
        raise InvalidRequest(
            f"resume.carry must be in 0..{len(block)}, not {resume.carry}", param="resume"
        )


def _take_up(state: BlockState, resume: Resume | None, *, moved: bool) -> None:
    """Apply ``resume``: at once where no prefill has to be repeated here."""
    if moved and resume is None:
        raise InvalidRequest("source needs resume: which pass comes next", param="resume")
    if resume is None:
        return
    state.initial_masks = resume.initial_masks
    if resume.step == 0:
        return
    state.resume = resume
    if moved or not state.strategy.keeps_kv:
        state.resume_now()
