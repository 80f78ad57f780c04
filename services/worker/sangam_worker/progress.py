"""What the start says of work that takes long: lines in the log now and then, or a bar.

Decides how often and in which form; whoever works says how far it is. ``__main__`` chooses the
form, ``start`` and what it calls report to it.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

import structlog

if TYPE_CHECKING:
    from rich.console import Console

log = structlog.get_logger(__name__)

Advance = Callable[[float], None]
"""Takes how much more is done, in the task's unit; 0 says that work goes on."""

_EVERY_SECONDS = 5.0


class Reports(Protocol):
    """Takes news of long work."""

    def task(self, what: str, total: float, unit: str) -> AbstractContextManager[Advance]:
        """A piece of work: ``total`` in ``unit``; it is done when the context is left."""
        ...


class LoggedReports:
    """Lines in the log: for a task, one every few seconds and one at its end.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    @contextmanager
    def task(self, what: str, total: float, unit: str) -> Iterator[Advance]:
        """See ``Reports``."""
        began = said_at = self._clock()
        done = 0.0

        def advance(amount: float) -> None:
            nonlocal done, said_at
            done += amount
            now = self._clock()
            if now - said_at >= _EVERY_SECONDS:
                said_at = now
                log.info(f"{what}: {done:.3g} of {total:.3g} {unit}", seconds=round(now - began))

        yield advance
        log.info(f"{what}: {total:.3g} {unit}", seconds=round(self._clock() - began, 1))


class ShownReports:
    """A bar on a terminal for each task; it goes when the task has ended.

    Needs rich, which what loads an engine without a worker around it may lack.
    """

    def __init__(self, console: "Console | None" = None) -> None:
        from rich.console import Console

        self._console = console or Console(stderr=True)

    @contextmanager
    def task(self, what: str, total: float, unit: str) -> Iterator[Advance]:
        """See ``Reports``."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn(f"{{task.completed:.3g}} of {{task.total:.3g}} {unit}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda amount: bar.advance(task, amount)


class NoReports:
    """Says nothing: tests, benchmarks and tools that have their own."""

    @contextmanager
    def task(self, what: str, total: float, unit: str) -> Iterator[Advance]:
        """See ``Reports``."""
        yield lambda amount: None


SILENT: Reports = NoReports()


def reports_for(log_format: str) -> Reports:
    """A bar where a person looks at a terminal, else lines in the log."""
    if log_format == "console" and sys.stderr.isatty():
        return ShownReports()
    return LoggedReports()
