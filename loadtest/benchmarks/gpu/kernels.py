"""Compiles FlashInfer's kernels in processes of their own while other things are measured.

Decides one process a library, in two waves (what the models need, then what only ``tests/gpu``
does, for its small heads), and what counts as ready. Which libraries there are the worker's
``flashinfer_kernels`` says; what is compiled is kept in FlashInfer's cache, where the engine finds
it. Called by the commands of this folder.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

WORKER = Path(__file__).parents[3] / "services" / "worker"

OF_MODELS, OF_TESTS = 1, 2
"""Waves that must be over for an engine of the benchmarks, and for every test."""

_LIST = """from sangam_worker import flashinfer_kernels as f
models, tests = f.wanted(), f.wanted(64)
names = {each.name for each in models}
print(*(each.name for each in models))
print(*(each.name for each in tests if each.name not in names))"""
_BUILD = """import os, sys
from sangam_worker import flashinfer_kernels as f
wave, name = int(sys.argv[1]), sys.argv[2]
os.nice(19 * (wave > 0))  # beside measurements
f.make_ninja_found()
[kernel] = [each for each in f.wanted((128, 64)[wave]) if each.name == name]
f.missing([kernel])  # passes over what was brought for other GPUs
kernel.build_and_load()"""
_LIST_SECONDS = 60
_FA3 = "_sm90"
"""In the name of what does without: FA2 computes the same."""
_ALL = "all"
"""Stands for every kernel, where FlashInfer does not even name them."""
_FA3_SECONDS = 270.0
"""By then FA3's kernels are there, or FA2's are measured alone."""

Commands = Mapping[str, Sequence[str]]
"""By the kernel's name."""


class Compilation:
    """Processes that compile.

    Args:
        waves: what says the commands of each wave, in a thread; raises ``RuntimeError``.
        fa3_seconds: FA3 is given up after so long.

    Attributes:
        seconds: when each ended, from the start. errors: the last lines of those that failed.
    """

    def __init__(
        self, waves: Callable[[], Sequence[Commands]], fa3_seconds: float = _FA3_SECONDS
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        self._fa3_seconds = fa3_seconds
        self._started = time.monotonic()
        self._changed = threading.Condition()
        self._left: list[set[str]] | None = None
        self._of_models: set[str] = set()
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._is_stopped = False
        threading.Thread(target=self._run, args=(waves,), daemon=True).start()

    @property
    def has_fa3(self) -> bool:
        """Whether FA3's kernels may be used: those of the models neither failed nor are awaited."""
        with self._changed:
            left = set[str]() if not self._left else self._left[0]
            return not any(_FA3 in name for name in {*left, *self._of_models & {*self.errors}})

    def is_ready(self, num_waves: int) -> bool:
        """Whether nothing of the first waves is under way any more, be it that it failed."""
        with self._changed:
            return self._is_ready(num_waves)

    def wait(self, num_waves: int, seconds: float) -> None:
        """Wait until they are ready, at most so long."""
        end = time.monotonic() + seconds
        with self._changed:
            while not self._is_ready(num_waves) and (left := end - time.monotonic()) > 0:
                self._changed.wait(min(left, 1.0))  # FA3 is given up without a notice

    def complaint(self, num_waves: int) -> str:
        """What failed of the models' that engines cannot do without; empty: nothing, or no matter.

        Of the tests' own kernels the tests tell themselves.
        """
        with self._changed:
            needed = {_ALL, *(name for name in self._of_models if _FA3 not in name)}
            failed = sorted(needed & {*self.errors}) if num_waves else []
        return f"failed: {', '.join(failed)}" if failed else ""

    def stop(self) -> None:
        """End what still runs, compilers too, and wait for its end."""
        with self._changed:
            self._is_stopped = True
            for process in self._running.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        with self._changed:
            self._changed.wait_for(lambda: not self._running, timeout=10)

    def _is_ready(self, num_waves: int) -> bool:
        if not num_waves or self._is_stopped:
            return True
        if self._left is None:
            return False
        left = set().union(*self._left[:num_waves])
        is_late = time.monotonic() - self._started > self._fa3_seconds
        return not left or (is_late and num_waves == OF_MODELS and all(_FA3 in n for n in left))

    def _run(self, waves: Callable[[], Sequence[Commands]]) -> None:
        try:
            commands = waves()
        except RuntimeError as error:
            commands = []
            self.errors[_ALL] = str(error)
        with self._changed:
            self._left = [set(wave) for wave in commands]
            self._of_models = set(commands[0]) if commands else set()
            self._changed.notify_all()
        for number, wave in enumerate(commands):
            threads = [
                threading.Thread(target=self._compile, args=(number, *each), daemon=True)
                for each in wave.items()
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _compile(self, wave: int, name: str, command: Sequence[str]) -> None:
        # A file, since nobody would read a pipe while a compiler fills it.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            with self._changed:
                if self._is_stopped:
                    return
                # A session of its own: should this process be lost, compilers go on for the next.
                process = self._running[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    text=True,
                    cwd=WORKER,
                    start_new_session=True,
                )
            status = process.wait()
            log.seek(0)
            last_lines = "\n".join(log.read().splitlines()[-8:])
        with self._changed:
            del self._running[name]
            if not self._is_stopped:
                self.seconds[name] = round(time.monotonic() - self._started, 1)
                if status:
                    self.errors[name] = last_lines or f"status {status}"
            assert self._left is not None
            self._left[wave].discard(name)
            self._changed.notify_all()


def nothing() -> Sequence[Commands]:
    """No waves: where FlashInfer is not used."""
    return ()


def models_waves() -> Sequence[Commands]:
    """Of those, what a worker asks of FlashInfer."""
    return flashinfer_waves()[:OF_MODELS]


def flashinfer_waves() -> Sequence[Commands]:
    """What a worker asks of FlashInfer, and what the tests do; what is there takes seconds.

    Raises:
        RuntimeError: FlashInfer cannot tell its kernels.
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
        raise RuntimeError(f"no list of kernels after {_LIST_SECONDS} s") from None
    if listed.returncode:
        raise RuntimeError(listed.stderr[-800:])
    waves = [line.split() for line in listed.stdout.splitlines()[-2:]]
    return [
        {name: [sys.executable, "-c", _BUILD, str(number), name] for name in names}
        for number, names in enumerate(waves)
    ]
