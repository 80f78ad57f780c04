"""Runs a command in a process of its own, and again where the device took that process with it.

After an illegal access no CUDA call of a process works any more, and a hung one never returns:
either costs the part that it was in, and the next process goes on behind it. Decides when to go on;
the results' file says where. However the command ends, by SIGTERM too, its table is written and
nothing that it started is left. Called by the commands' ``__main__``; imports no torch, whose
import takes seconds and whose use of a device this process must not have.
"""

import argparse
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from benchmarks.gpu.parts import end_running, parts_of, say

BAD_OPTIONS = 2
"""``argparse``'s."""

PASSES_FOLDER, SERVING_FOLDER = ".sangam/bench-gpu", ".sangam/bench-gpu-serving"
"""The results' where none is named."""

RESULTS = "results.json"
SECONDS = 465.0
"""Of a run: eight minutes with what comes before and after it."""

GO_ON = 75
"""Exit status of a process whose device does not answer any more (``EX_TEMPFAIL``)."""

HAS_COMPLAINTS = 3
"""Of one that ran to its end, but not all of its parts did (1 is that of a crash)."""

TERMINATED = 128 + signal.SIGTERM

_MOST_STARTS = 6
_LEAST_SECONDS = 20.0
_GRACE_SECONDS = 15.0
_WRITE_SECONDS = 60.0
_KILLED_SECONDS = 5.0
"""A killed process is gone by then, or stuck in a driver, where nothing reaches it."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def supervise(module: str, arguments: Sequence[str], folder: str, target: str) -> int:
    """``supervised`` with a command's own options; exit status.

    Args:
        folder: the results' by default.
        target: what ``make`` calls the command.
    """
    if importlib.util.find_spec("torch") is None:
        say(
            f"torch is not installed for {sys.executable}; name a Python that has it: "
            f"make {target} PYTHON=..."
        )
        return BAD_OPTIONS
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--out", type=Path, default=Path(folder))
    given, rest = parser.parse_known_args(arguments)
    out = ["--out", str(given.out)]
    return supervised(module, [*rest, *out], given.seconds, given.out / RESULTS)


def supervised(
    module: str,
    arguments: Sequence[str],
    seconds: float,
    results: Path,
    grace_seconds: float = _GRACE_SECONDS,
) -> int:
    """Run ``module``'s ``main`` in processes, one after the other, within the time; exit status.

    Every one but the first gets ``--resume``, and each what is left of the time. One that ran no
    part before it ended is the last. What one that did not get to its end left is written out by
    ``module``'s ``write_files``, in a process too.

    Args:
        results: the file that they write; an old one is removed, so as not to be gone on with.
        grace_seconds: what a process may take beyond its time before it is killed.
    """
    results.unlink(missing_ok=True)
    with _nothing_left_behind():
        try:
            with _ended_by_sigterm():
                status = _run(module, arguments, seconds, results, grace_seconds)
        except Terminated:
            say("NOT DONE  terminated")
            status = TERMINATED
        if status in (0, BAD_OPTIONS, HAS_COMPLAINTS):
            return status
        _write_out(module, results)
    return TERMINATED if status == TERMINATED else HAS_COMPLAINTS


def _run(
    module: str, arguments: Sequence[str], seconds: float, results: Path, grace_seconds: float
) -> int | None:
    """The last process' exit status; ``None`` when it did not get to its end."""
    ends, num_parts = time.monotonic() + seconds, 0
    # Whatever a device's libraries may wait for at an interpreter's end: everything is written.
    code = f"import os, sys; from {module} import main; status = main(); sys.stdout.flush(); "
    code += "os._exit(status)"
    for start in range(_MOST_STARTS):
        left = ends - time.monotonic()
        if start and left < _LEAST_SECONDS:
            return None
        more = ["--seconds", f"{left:.3f}", *(["--resume"] if start else [])]
        status = _status([sys.executable, "-c", code, *arguments, *more], left + grace_seconds)
        if status is None:
            say("NOT DONE  the process did not end in time")
            return None
        if status in (0, BAD_OPTIONS, HAS_COMPLAINTS):
            return status
        say(f"NOT DONE  a process ended with status {status}")
        if len(parts_of(results)) == num_parts:
            return None
        num_parts = len(parts_of(results))
    return None


def _status(command: Sequence[str], seconds: float) -> int | None:
    """Of a process that ends with this one; ``None`` when it had to be killed."""
    process = subprocess.Popen(command, preexec_fn=ends_with_parent)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_SECONDS)


def _write_out(module: str, results: Path) -> None:
    """Make the table of the parts that there are, which the process that ended did not."""
    if not results.exists():
        return
    end_running(results)
    code = f"import pathlib, sys; from {module} import write_files; "
    code += "write_files(pathlib.Path(sys.argv[1]))"
    if _status([sys.executable, "-c", code, str(results.parent)], _WRITE_SECONDS) != 0:
        say(f"NOT DONE  no table of {results}")


class Terminated(BaseException):
    """SIGTERM came."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ends_with_parent() -> None:
    """Have this process killed when the one that started it ends (Linux); for ``preexec_fn``."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """At the end kill what those that were started here started, though they be gone (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before = _descendants()
    try:
        yield
    finally:
        for pid in _descendants() - before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _descendants() -> set[int]:
    """Processes that this one, or one of those, is the parent of."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # it has ended
            parent = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        own = children.get(waiting.pop(), [])
        found.update(own)
        waiting += own
    return found


def _prctl(option: int, value: int) -> None:
    """Linux' call; elsewhere nothing happens."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
