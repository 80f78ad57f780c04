"""Work that must be carried through even when the coroutine that asked for it is cancelled.

A cancelled caller would otherwise leave a command half sent, or a reservation that nobody knows
of. The tasks belong to the ledger, which waits for them when it closes.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class OwnedTasks:
    """A set of tasks with an owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work in a task of its own."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work; a cancelled caller leaves it running."""
        return await asyncio.shield(self.start(work))

    async def aclose(self) -> None:
        """Wait for everything that still runs."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone: then nobody else looks at it
