"""Shows what a command does and waits for it, with a deadline; a blip of the cluster is no end.

Called by ``rebalance`` and ``drain``. On a terminal what is waited for spins in one line; in a
pipe it is a line whenever it changes.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from sangam_core.errors import SangamError
from sangam_router.kubectl.cluster import ClusterUnavailable
from sangam_router.kubectl.routers import RoutersUnreachable

POLL_SECONDS = 0.5


class TimedOut(SangamError):
    """What was waited for did not come; the text says what is missing."""


class Progress:
    """Tells and waits.

    Args:
        timeout_seconds: of each single wait.
        poll_seconds: between two looks.
    """

    def __init__(
        self, console: Console, *, timeout_seconds: float, poll_seconds: float = POLL_SECONDS
    ) -> None:
        self._console = console
        self._timeout_seconds = timeout_seconds
        self._poll_seconds = poll_seconds

    def tell(self, text: str) -> None:
        """One line that stays."""
        self._console.print(escape(text), soft_wrap=True)

    def wait(self, what: str, missing: Callable[[], str | None]) -> None:
        """Look until nothing is missing.

        Args:
            what: the step, told with its duration when it is done.
            missing: what is not so yet, None when all is; may raise that the API server or the
                routers do not answer, which is then what is missing.

        Raises:
            TimedOut: it took longer than the timeout.
        """
        started = time.monotonic()
        with self._shown(what) as show:
            while (lack := _lack(missing)) is not None:
                if time.monotonic() - started > self._timeout_seconds:
                    raise TimedOut(
                        f"{what}: not done after {self._timeout_seconds:g} s ({lack}); "
                        "the same command takes it up where it stopped"
                    )
                show(lack)
                time.sleep(self._poll_seconds)
        self.tell(f"{what} ({time.monotonic() - started:.1f} s)")

    def insist(self, what: str, change: Callable[[], None]) -> None:
        """Carry out a change that may be repeated, again while the API server does not answer.

        Raises:
            TimedOut: it did not answer in time.
        """
        deadline = time.monotonic() + self._timeout_seconds
        with self._shown(what) as show:
            while True:
                try:
                    return change()
                except ClusterUnavailable as error:
                    if time.monotonic() > deadline:
                        raise TimedOut(f"{what}: {error}") from None
                    show(str(error))
                    time.sleep(self._poll_seconds)

    @contextmanager
    def _shown(self, what: str) -> Iterator[Callable[[str], None]]:
        if self._console.is_terminal:
            with Status(escape(what), console=self._console) as status:
                yield lambda lack: status.update(escape(f"{what}: {lack}"))
            return
        told = ""

        def tell(lack: str) -> None:
            nonlocal told
            if lack != told:
                told = lack
                self.tell(f"  {what}: {lack}")

        yield tell


def _lack(missing: Callable[[], str | None]) -> str | None:
    try:
        return missing()
    except (ClusterUnavailable, RoutersUnreachable) as error:
        return str(error)
