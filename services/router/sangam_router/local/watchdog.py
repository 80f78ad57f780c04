"""Kills a local cluster whose owner has vanished; decides nothing else.

``sangam up`` starts it as a plain script and tells it over stdin which process groups are alive
(``+PID`` and ``-PID``, one a line). When stdin ends, the owner is gone, by ``kill -9`` too, and
every group still listed is killed. Works on every POSIX system, where a parent-death signal is
Linux's alone. Standard library only: it starts in isolated mode, in milliseconds.
"""

import contextlib
import os
import signal
import sys
from typing import TextIO


def watch(lines: TextIO) -> None:
    """Follow the list of groups until the stream ends, then kill what is left of it."""
    alive: set[int] = set()
    for line in lines:
        change, pid = line[0], int(line[1:])
        if change == "+":
            alive.add(pid)
        else:
            alive.discard(pid)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(sys.stdin)
