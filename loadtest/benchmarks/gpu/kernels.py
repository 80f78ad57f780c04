"""Compiles FlashInfer's kernels in processes of their own while other things are measured.

Decides one process a library, and what counts as ready. Which libraries there are the worker's
``flashinfer_kernels`` says; what is compiled is kept in FlashInfer's cache, where the engine finds
it. Called by the commands of this folder.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

WORKER = Path(__file__).parents[3] / "services" / "worker"

_LIST = """from sangam_worker import flashinfer_kernels as f
print(*(each.name for each in f.wanted()), sep="\\n")"""
_BUILD = """import sys
from sangam_worker import flashinfer_kernels as f
[kernel] = [each for each in f.wanted() if each.name == sys.argv[1]]
kernel.build_and_load()"""
_LIST_SECONDS = 60


class Compilation:
    """Processes that compile.

    Args:
        commands: by name.

    Attributes:
        seconds: how long each took that has ended. errors: the last lines of those that failed.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self.seconds: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        self._started = time.monotonic()
        self._running = {name: _begun(command) for name, command in commands.items()}

    @property
    def is_ready(self) -> bool:
        """Whether nothing is under way any more, be it that it failed."""
        for name, (process, log) in [*self._running.items()]:
            if process.poll() is None:
                continue
            self.seconds[name] = round(time.monotonic() - self._started, 1)
            if process.returncode:
                log.seek(0)
                self.errors[name] = "\n".join(log.read().splitlines()[-8:])
            log.close()
            del self._running[name]
        return not self._running

    def wait(self, seconds: float) -> None:
        """Wait until it is ready, at most so long."""
        end = time.monotonic() + seconds
        for process, _ in [*self._running.values()]:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def stop(self) -> None:
        """End what still runs."""
        for process, log in self._running.values():
            process.kill()
            process.wait()
            log.close()
        self._running.clear()


def _begun(command: Sequence[str]) -> tuple["subprocess.Popen[str]", IO[str]]:
    # A file, since nobody would read a pipe while a compiler fills it.
    log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, cwd=WORKER
    )
    return process, log


def flashinfer_compilation() -> Compilation:
    """Compile what a worker asks of FlashInfer; what is there already takes seconds.

    Where FlashInfer cannot tell its kernels that is an error among the others': what does without
    them is measured all the same.
    """
    try:
        listed = subprocess.run(
            [sys.executable, "-c", _LIST],
            cwd=WORKER,
            capture_output=True,
            text=True,
            timeout=_LIST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _failed(f"no list of kernels after {_LIST_SECONDS} s")
    if listed.returncode:
        return _failed(listed.stderr[-800:])
    names = listed.stdout.split()
    return Compilation({name: [sys.executable, "-c", _BUILD, name] for name in names})


def _failed(why: str) -> Compilation:
    compilation = Compilation({})
    compilation.errors["all"] = why
    return compilation
