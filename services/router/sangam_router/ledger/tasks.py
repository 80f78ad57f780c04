"""Work that must be carried through even when the coroutine that asked for it is cancelled.

A cancelled caller would otherwise leave a command half sent, or a reservation that nobody knows
of. The tasks belong to the ledger, which waits for them when it closes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def raise_if_cancelled() -> None:
    """Cancel after all, where an error and a cancellation met and the error came out on top.

    To be asked by whoever goes on behind an error. Up to Python 3.12 a task group that fails while
    its task is being cancelled raises only the failure, and a call of Redis that is cancelled as it
    breaks off may raise only that: a request would live on whose client is gone, and a loop would
    never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


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


class SharedRuns(Generic[T]):
    """Runs of the same work, one at a time, each for everybody who asked before it began.

    Whoever asks while a run is under way gets the next one, with all others who do: a run under
    way may have looked already at what the caller has just changed.
    """

    def __init__(self, work: Callable[[], Awaitable[T]], tasks: OwnedTasks) -> None:
        self._work = work
        self._tasks = tasks
        self._upcoming: asyncio.Task[T] | None = None
        self._running = asyncio.Lock()

    async def run(self) -> T:
        """Have it run once more, wholly after this call. Raises what the work raises."""
        if self._upcoming is None:
            self._upcoming = self._tasks.start(self._next())
        return await asyncio.shield(self._upcoming)

    async def _next(self) -> T:
        async with self._running:
            self._upcoming = None
            return await self._work()
