"""What an answer looks like while it is being unmasked: settled text, and cells that fill.

Pure: chunks of the stream in, a styled text out. ``chat`` shows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from sangam_core.geometry import DEFAULT_BLOCK_LENGTH

MASK_CELL = "·"
_END_CELL = "▪"
_VISIBLE = {"\n": "⏎", "\t": "⇥", "\ufffd": "▫"}
"""Unsettled cells keep to one line; half a character is a box until its other half comes."""


@dataclass(slots=True)
class UnmaskingView:
    """One answer.

    Attributes:
        settled: text that is certain, in order.
        timings: where the time went, once the answer is over; empty until then.
    """

    settled: str = ""
    finish_reason: str | None = None
    timings: dict[str, Any] = field(default_factory=dict)
    _num_prompt: int | None = None
    _num_settled: int = 0
    _last_block: int = -1
    _cells: dict[int, str] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens that have settled."""
        return self._num_settled

    def take(self, chunk: Mapping[str, Any]) -> str:
        """Take in a chunk of the stream; returns the text it settled."""
        usage = chunk.get("usage") or {}
        self._num_prompt = usage.get("prompt_tokens", self._num_prompt)
        self._num_settled = usage.get("completion_tokens", self._num_settled)
        self.timings = (chunk.get("sangam") or {}).get("timings") or self.timings
        new = ""
        for choice in chunk.get("choices", ()):
            new += (choice.get("delta") or {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            for commit in choice.get("denoising") or ():
                self._last_block = max(self._last_block, commit["block"])
                self._cells[commit["position"]] = commit["text"]
        self.settled += new
        return new

    def render(self) -> Text:
        """The answer as it stands: settled text plain, committed cells bright, masks dim."""
        shown = Text(self.settled)
        if self._num_prompt is None or self.finish_reason is not None:
            return shown
        start = self._num_prompt + self._num_settled
        stop = self._num_prompt + (self._last_block + 1) * DEFAULT_BLOCK_LENGTH
        for position in range(start, stop):
            cell = self._cells.get(position)
            if cell is None:
                shown.append(MASK_CELL, style="dim")
            elif _is_special(cell):
                shown.append(_END_CELL, style="dim")
                break
            else:
                shown.append(_VISIBLE.get(cell, cell), style="bold cyan")
        return shown


def _is_special(cell: str) -> bool:
    """Whether a token's text is a special token spelled out, as LLaDA's and Dream's are."""
    return cell.startswith("<|") and cell.endswith("|>")
