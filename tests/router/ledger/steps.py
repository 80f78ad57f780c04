"""Stops a coroutine at its k-th step: by cancelling it there, or by never resuming it."""

import asyncio
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any


class Stepped(Awaitable[bool]):
    """Drives a coroutine and counts its steps (one more than its suspensions).

    Args:
        cancel_at: throw ``CancelledError`` instead of taking this step.
        freeze_at: never take this step; ``frozen`` is set then.

    Awaiting it returns whether the coroutine ran to its end undisturbed.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, None],
        *,
        cancel_at: int | None = None,
        freeze_at: int | None = None,
    ) -> None:
        self.num_steps = 0
        self.frozen = asyncio.Event()
        self._work = work
        self._cancel_at = cancel_at
        self._freeze_at = freeze_at

    def __await__(self) -> Generator[Any, Any, bool]:
        while True:
            if self.num_steps == self._freeze_at:
                self.frozen.set()
                try:
                    yield from asyncio.get_running_loop().create_future()
                except asyncio.CancelledError:  # the test is over: let it clear up
                    self._freeze_at, self._cancel_at = None, self.num_steps
            try:
                if self.num_steps == self._cancel_at:
                    awaited = self._work.throw(asyncio.CancelledError())
                else:
                    awaited = self._work.send(None)
            except StopIteration:
                return True
            except asyncio.CancelledError:
                return False
            finally:
                self.num_steps += 1
            try:
                yield awaited
            except asyncio.CancelledError:
                self._cancel_at = self.num_steps

    async def run(self) -> bool:
        """Await it (as a coroutine, for tasks)."""
        return await self


async def num_steps_of(work: Coroutine[Any, Any, None]) -> int:
    """How many steps a coroutine takes when nothing disturbs it."""
    stepped = Stepped(work)
    assert await asyncio.create_task(stepped.run())
    return stepped.num_steps
