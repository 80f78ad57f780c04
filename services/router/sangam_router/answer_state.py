"""An answer as it fills: token ids, the current block's progress, and what can be told of it.

Decides what has settled, when the answer is over, and what a block needs to start again
elsewhere. Pure; the driver feeds it the passes of whichever worker runs the block.
"""

from sangam_core.decoding import Commit, EosRule, Resume
from sangam_core.errors import BlockLost
from sangam_core.wire import PassRan
from sangam_router.job import Delta, Denoised, FinishReason, Job
from sangam_router.text_stream import Decode, TextStream

_END_OF_TOKENS = 2**32
"""Tokenizers take ids below this one; those that they do not know have no text."""


class AnswerState:
    """Progress of one answer.

    Args:
        job: the request. mask_id: the model's mask token. decode: ids to text.
    """

    def __init__(self, job: Job, mask_id: int, decode: Decode) -> None:
        self._geometry = job.geometry
        self._mask_id = mask_id
        self._max_tokens = job.max_tokens
        decoding = job.decoding
        self._eos_ids = frozenset(decoding.eos_ids if decoding.eos_rule is EosRule.END else ())
        self._text = TextStream(decode, job.stops)
        self.ids: list[int] = [*job.prompt_ids, *[mask_id] * job.geometry.mask_buffer_tokens]
        self._settled = job.geometry.prompt_tokens
        self.block = 0
        self.step = 0
        self._carry = 0.0
        self._commits: list[Commit] = []
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer that have settled."""
        return self._text.num_tokens

    # -- what a worker needs ----------------------------------------------------------------

    def ids_at_block_start(self) -> tuple[int, ...]:
        """The sequence as it was before the current block's first pass."""
        block = self._geometry.block_range(self.block)
        ids = self.ids
        return (*ids[: block.start], *[self._mask_id] * len(block), *ids[block.stop :])

    def restart(self) -> Resume | None:
        """Where a lost block goes on, beside ``ids_at_block_start``; ``None`` if from scratch."""
        return self._resume(tuple(self._commits)) if self.step else None

    def moved(self) -> Resume:
        """Where a prefilled block goes on whose KV moves; ``ids`` hold the commits already."""
        return self._resume(())

    def _resume(self, commits: tuple[Commit, ...]) -> Resume:
        return Resume(
            step=self.step,
            initial_masks=len(self._geometry.block_range(self.block)),
            commits=commits,
            carry=self._carry,
        )

    # -- what a worker reports ----------------------------------------------------------------

    def apply(self, event: PassRan) -> Delta:
        """Take in a pass of the current block; sets ``finish_reason`` when that ends the answer.

        Raises:
            BlockLost: the pass is not the one that comes next, or commits what it must not: the
                worker cannot be trusted with the block.
        """
        if event.step != self.step:
            raise BlockLost(f"pass {event.step} reported where {self.step} was due")
        self._check(event)
        for commit in event.commits:
            self.ids[commit.position] = commit.token
        self.step += 1
        self._carry = event.carry
        self._commits += event.commits
        text = self._advance_text()
        return Delta(
            text=text,
            num_tokens=self.num_tokens,
            denoised=tuple(Denoised(self.block, event.step, commit) for commit in event.commits),
        )

    def is_block_complete(self) -> bool:
        """Whether the current block has no mask left."""
        block = self._geometry.block_range(self.block)
        return self._mask_id not in self.ids[block.start : block.stop]

    def next_block(self, block: int) -> None:
        """Go on to a block; the one before is complete."""
        self.block, self.step, self._carry = block, 0, 0.0
        self._commits = []

    def _check(self, event: PassRan) -> None:
        """Refuse a pass as a whole: whoever runs the block next must find its masks."""
        block = self._geometry.block_range(self.block)
        seen: set[int] = set()
        for commit in event.commits:
            position = commit.position
            if position not in block or position in seen or self.ids[position] != self._mask_id:
                raise BlockLost(f"pass {event.step} committed position {position}, not a mask")
            if commit.token == self._mask_id:
                raise BlockLost(f"pass {event.step} committed a mask at {position}")
            if not 0 <= commit.token < _END_OF_TOKENS:
                raise BlockLost(f"pass {event.step} committed token {commit.token}")
            seen.add(position)

    def _advance_text(self) -> str:
        """Text of what has newly settled; decides whether that ends the answer."""
        ids, start = self.ids, self._settled
        limit = self._geometry.prompt_tokens + self._max_tokens
        position = start
        is_eos = False
        while position < limit:
            token = ids[position]
            if token == self._mask_id:
                break
            if token in self._eos_ids:
                is_eos = True
                break
            position += 1
        self._settled = position
        text = self._text.push(ids[start:position])
        if self._text.is_stopped or is_eos:
            self.finish_reason = "stop"
        elif position == limit:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._text.finish()
            if self._text.is_stopped:
                self.finish_reason = "stop"
        return text
