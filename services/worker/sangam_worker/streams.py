"""A block's events on their way to whoever started it: one JSON line each.

The service pushes, the API's response takes. Lives on the event loop; knows neither the
scheduler nor HTTP.
"""

import asyncio
import time
from collections.abc import AsyncIterator

from sangam_core.wire import BLOCK_EVENT, BlockEvent, BlockKey, Completed, KVSent, Lost, Ping

_LAST_EVENTS = (Completed, KVSent, Lost)


def is_last(event: BlockEvent) -> bool:
    """Whether a block's stream ends with this event."""
    return isinstance(event, _LAST_EVENTS)


def line_of(event: BlockEvent) -> bytes:
    """An event as a line of the stream."""
    return BLOCK_EVENT.dump_json(event) + b"\n"


PING_LINE = line_of(Ping())


class BlockStream:
    """The lines of one block, with one reader."""

    def __init__(self, key: BlockKey) -> None:
        self.key = key
        self.is_abandoned = False
        """Whether the reader is gone: the lines are dropped."""
        self.ended = asyncio.Event()
        self._lines: list[bytes] = []
        self._has_lines = asyncio.Event()
        self._last_line_seconds = time.monotonic()

    def push(self, event: BlockEvent) -> None:
        """Append an event; nothing may follow the last one."""
        assert not self.ended.is_set(), f"{self.key}: {event.type} after the last event"
        self._append(line_of(event))
        if is_last(event):
            self.ended.set()

    def abandon(self) -> None:
        """The reader is gone: drop what is queued and what comes."""
        self.is_abandoned = True
        self._lines.clear()
        self._has_lines.set()

    def ping(self, quiet_seconds: float) -> None:
        """Append a ping if nothing has been said for ``quiet_seconds``."""
        if time.monotonic() - self._last_line_seconds >= quiet_seconds:
            self._append(PING_LINE)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The lines as they come, those at hand in one piece, until the block has ended."""
        while True:
            await self._has_lines.wait()
            self._has_lines.clear()
            if self.is_abandoned:
                return
            lines, self._lines = self._lines, []
            yield b"".join(lines)
            if self.ended.is_set() and not self._lines:
                return

    def _append(self, line: bytes) -> None:
        if self.is_abandoned:
            return
        self._lines.append(line)
        self._last_line_seconds = time.monotonic()
        self._has_lines.set()
