"""Runs a command in a process of its own, and again where the device took that process with it.

After an illegal access no CUDA call of a process works any more, and a hung one never returns:
either costs the part that it was in, and the next process goes on behind it. Decides when to go on;
the results' file says where. Called by the commands' ``__main__``; imports no torch, whose import
takes seconds and whose use of a device this process must not have.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

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

_MOST_STARTS = 6
_LEAST_SECONDS = 20.0
_GRACE_SECONDS = 15.0
_WRITE_SECONDS = 60.0


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
    ends, num_parts = time.monotonic() + seconds, 0
    code = f"import sys; from {module} import main; sys.exit(main())"
    for start in range(_MOST_STARTS):
        left = ends - time.monotonic()
        if start and left < _LEAST_SECONDS:
            break
        more = ["--seconds", f"{left:.3f}", *(["--resume"] if start else [])]
        command = [sys.executable, "-c", code, *arguments, *more]
        try:
            status = subprocess.run(command, timeout=left + grace_seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            say("NOT DONE  the process did not end in time")
            break
        if status in (0, BAD_OPTIONS, HAS_COMPLAINTS):
            return status
        say(f"NOT DONE  a process ended with status {status}")
        if len(parts_of(results)) == num_parts:
            break
        num_parts = len(parts_of(results))
    _write_out(module, results)
    return HAS_COMPLAINTS


def _write_out(module: str, results: Path) -> None:
    """Make the table of the parts that there are, which the process that ended did not."""
    if not results.exists():
        return
    end_running(results)
    code = f"import pathlib, sys; from {module} import write_files; "
    code += "write_files(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(results.parent)]
    try:
        status = subprocess.run(command, timeout=_WRITE_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        status = None
    if status != 0:
        say(f"NOT DONE  no table of {results}")
