"""How many blocks a worker receives, or sends, at once: as many as its transport can.

The receiver takes its place before it asks, the sender before it answers: whoever has been answered
waits for nobody's place any more, so that full workers cannot wait for each other in a circle.
Peers that cannot be reached hold at most half of the places: a pair that is not connected yet
needs another's leave first. Called by ``exchange``, on the event loop.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from sangam_core.errors import TransferError


class TransferPlaces:
    """The places of one worker, in one direction.

    Args:
        num_places: at least 1.
        moved: what becomes of blocks in them (``received``), for people.
    """

    def __init__(self, num_places: int, moved: str) -> None:
        self._num_places = num_places
        self._moved = moved
        self._all = asyncio.Semaphore(num_places)
        self._connecting = asyncio.Semaphore(max(1, num_places // 2))

    @asynccontextmanager
    async def taken(self, *, is_connected: bool, timeout_seconds: float) -> AsyncIterator[None]:
        """Hold a place. ``TransferError`` when none comes free in time."""
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(timeout_seconds):
                    if not is_connected:
                        await held.enter_async_context(self._connecting)
                    await held.enter_async_context(self._all)
            except TimeoutError:
                raise TransferError(
                    f"other blocks are being {self._moved} (at most {self._num_places} at once, "
                    "half of them with new peers), and none was before the deadline"
                ) from None
            yield
