"""What other threads ask of the GPU thread, and the lock on its books.

Decides what is carried out between two iterations and what beside a running one. Whoever reads or
changes the books holds the lock, and the GPU thread lets go of it while the engine computes. Used
by ``loop`` only.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

_ResultT = TypeVar("_ResultT")

Command = Callable[[], object]


class Inbox:
    """Commands for the GPU thread, in order.

    Attributes:
        lock: on the books: whoever reads or changes them holds it.
    """

    def __init__(self) -> None:
        # Reentrant: an answer's callback runs under it, and may ask for more.
        self.lock = threading.RLock()
        self._commands: SimpleQueue[Command] = SimpleQueue()

    def put(self, command: Command) -> None:
        """Carry out a command between two iterations."""
        self._commands.put(command)

    def put_at_once(self, command: Command) -> None:
        """Carry out a command now, on the caller's thread and beside a running iteration.

        For what touches no block of a plan under way: no gap is the longer for it.
        """
        with self.lock:
            command()
        self._commands.put(_nothing)  # the GPU thread looks at its books again

    def ask(self, answer: Callable[[], _ResultT]) -> "Future[_ResultT]":
        """Carry out a question between two iterations."""
        future: Future[_ResultT] = Future()

        def carry_out() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(answer())

        self._commands.put(carry_out)
        return future

    def ask_at_once(self, answer: Callable[[], _ResultT]) -> "Future[_ResultT]":
        """Carry out a question now, on the caller's thread and beside a running iteration.

        For what touches no block of a plan under way. ``None`` (no room, not held) is no answer
        yet: what was put before may change it, so it is worked out again after that, between two
        iterations.
        """
        with self.lock:
            found = answer()
        if found is None:
            return self.ask(answer)
        future: Future[_ResultT] = Future()
        future.set_result(found)
        self._commands.put(_nothing)  # the GPU thread looks at its books again
        return future

    def take(self, goes_on: Callable[[], bool], *, waits: bool, wait_seconds: float | None) -> None:
        """Carry out what was put, on the GPU thread, as long as ``goes_on`` says so.

        Args:
            waits: wait for a first command, for at most ``wait_seconds`` (``None``: for ever).
        """
        try:
            if waits:
                self._carry_out(self._commands.get(timeout=wait_seconds))
            while goes_on():
                self._carry_out(self._commands.get_nowait())
        except Empty:
            pass

    def _carry_out(self, command: Command) -> None:
        with self.lock:
            command()


def _nothing() -> None:
    """Only wakes the GPU thread."""
