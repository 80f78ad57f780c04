"""Turns an answer's token ids, as they settle in order, into text that can be sent and never
taken back.

Decides what may leave: no incomplete UTF-8, no part of a stop string, nothing from a stop string
on. Which ids have settled is the answer's business (``answer_state``); the driver calls it once
a pass.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special ones left out, U+FFFD where UTF-8 is incomplete."""

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Incremental decoding: the text that a growing list of ids has for certain.

    The decoder sees a window that starts one push back, since some tokenizers (sentencepiece)
    decode a token differently at the start of a text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window_start = 0
        self._read = 0
        self._sent_of_window = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; returns the text that is certain now, without what was returned before."""
        self._ids += ids
        text = self._decode(self._ids[self._window_start :])
        certain = text.rstrip(_INCOMPLETE)
        new = certain[self._sent_of_window :]
        self._sent_of_window = max(self._sent_of_window, len(certain))
        if certain == text:
            self._window_start, self._read = self._read, len(self._ids)
            self._sent_of_window = len(self._decode(self._ids[self._window_start :]))
        return new

    def finish(self) -> str:
        """What was held back; bytes that never became a character show as U+FFFD."""
        text = self._decode(self._ids[self._window_start :])
        new = text[self._sent_of_window :]
        self._sent_of_window = len(text)
        return new


class StopScanner:
    """Finds the first stop string in a growing text, and holds back what may be part of one.

    The stop string that *completes* first wins (then the one that starts first), so that the
    result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Add text; returns what can be sent. Nothing more comes once ``is_stopped``."""
        if self.is_stopped or not self._stops:
            return "" if self.is_stopped else text
        text = self._held + text
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)[1]]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What was held back, now that the text has ended without a stop string."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """Detokenizer and stop scanner of one answer."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._detokenizer = Detokenizer(decode)
        self._scanner = StopScanner(stops)
        self._ids: list[int] = []
        self._is_finished = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has been found."""
        return self._scanner.is_stopped

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far, up to and with the one that completed a stop string."""
        return len(self._ids)

    def push(self, ids: Sequence[int]) -> str:
        """Add ids that have settled, in order; returns the text that can be sent."""
        assert not self.is_stopped
        num_before = len(self._ids)
        self._ids += ids
        text = self._scanner.push(self._detokenizer.push(ids)) if ids else ""
        if self.is_stopped:
            self._cut(num_before)
        return text

    def finish(self) -> str:
        """The last piece of text; idempotent."""
        if self._is_finished or self.is_stopped:
            return ""
        self._is_finished = True
        num_before = len(self._ids)
        text = self._scanner.push(self._detokenizer.finish())
        if self.is_stopped:
            self._cut(num_before)
            return text
        return text + self._scanner.finish()

    def _cut(self, num_before: int) -> None:
        """Drop the ids behind the one that completed the stop string (they arrive in bulk)."""
        for num in range(num_before, len(self._ids)):
            text = self._decode(self._ids[:num])
            if any(stop in text for stop in self._stops):
                del self._ids[num:]
                return


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
