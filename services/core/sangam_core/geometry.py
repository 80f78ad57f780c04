"""Where a request's blocks lie in its token sequence, and what its passes cost.

Decides positions, token costs and page counts; knows nothing of workers or time. Used by the
router (limits, reservations), the worker's scheduler and the simulator.
"""

from dataclasses import dataclass

PAGE_TOKENS = 16
"""Tokens in one KV page (design: page layout ``(pages, 2, 16, kv_heads, head_dim)``)."""

DEFAULT_BLOCK_LENGTH = 32
"""Positions of a block in LLaDA's and Dream's block-cached decoding."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """A prompt followed by ``num_blocks`` whole blocks of masks: the mask buffer.

    Raises:
        ValueError: when the prompt is negative, or a block or the buffer is empty.
    """

    prompt_tokens: int
    num_blocks: int
    block_length: int = DEFAULT_BLOCK_LENGTH

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0:
            raise ValueError(f"prompt_tokens must be >= 0, not {self.prompt_tokens}")
        if self.block_length < 1:
            raise ValueError(f"block_length must be >= 1, not {self.block_length}")
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks must be >= 1, not {self.num_blocks}")

    @classmethod
    def for_answer(
        cls, prompt_tokens: int, max_tokens: int, block_length: int = DEFAULT_BLOCK_LENGTH
    ) -> "Geometry":
        """Round ``max_tokens`` (tokens) up to whole blocks."""
        num_blocks = -(-max_tokens // block_length) if block_length > 0 else 0
        return cls(prompt_tokens, num_blocks, block_length)

    @property
    def mask_buffer_tokens(self) -> int:
        """L, the masks appended to the prompt."""
        return self.num_blocks * self.block_length

    @property
    def total_tokens(self) -> int:
        """Prompt + L: rows of a prefill, and its cost (at every refresh)."""
        return self.prompt_tokens + self.mask_buffer_tokens

    @property
    def num_pages(self) -> int:
        """Pages that one block holds while it is prefilled, moved and decoded."""
        return -(-self.total_tokens // PAGE_TOKENS)

    def block_start(self, block: int) -> int:
        """Position of a block's first token. ``ValueError`` when there is no such block."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not in 0..{self.num_blocks - 1}")
        return self.prompt_tokens + block * self.block_length

    def block_stop(self, block: int) -> int:
        """Position behind a block's last token."""
        return self.block_start(block) + self.block_length

    def block_range(self, block: int) -> range:
        """Positions of a block."""
        start = self.block_start(block)
        return range(start, start + self.block_length)
