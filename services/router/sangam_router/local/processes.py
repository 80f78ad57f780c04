"""One child process that is kept alive: started, probed, restarted with backoff, stopped.

Decides when a child counts as ready, when it is started again and how it ends. It does not know
what the children are (``cluster``) nor what is shown of them (``up``); both hear of every change
as a ``ProcessEvent``.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from sangam_core.errors import SangamError

Probe = Callable[[], Awaitable[bool]]
"""Whether the child does its work now; must have its own deadline."""

TERM_GRACE_SECONDS = 10.0
"""From SIGTERM to SIGKILL."""

_PROBE_EVERY_SECONDS = 0.1
_FIRST_BACKOFF_SECONDS = 0.25
_LONGEST_BACKOFF_SECONDS = 10.0
_CALM_SECONDS = 20.0
"""A child that was ready for this long and then dies is restarted without a long wait."""
_NUM_TAIL_LINES = 15


class StartFailed(SangamError):
    """A child ended, or was not ready in time, before the cluster had started."""


class ProcessState(StrEnum):
    """Where a child stands."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    """A change of a child's state.

    Attributes:
        seconds: from its start to being ready, or until it is started again; 0 otherwise.
        detail: how it ended.
    """

    name: str
    state: ProcessState
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. ``env`` is added to the environment of the owner."""

    name: str
    argv: tuple[str, ...]
    log_path: Path
    probe: Probe
    env: Mapping[str, str] = field(default_factory=dict)


class Watchdog:
    """Handle on the process that kills the children when their owner is killed."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, in a session of its own: what kills the owner's group spares it."""
        script = Path(__file__).with_name("watchdog.py")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(script),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    def note(self, change: str) -> None:
        """Tell it of a process group: ``+PID`` or ``-PID``."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{change}\n".encode())

    async def stop(self) -> None:
        """End it; it kills whatever it still has on its list."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
        self._process = None


class SupervisedProcess:
    """A child that is started again whenever it ends, until ``stop``.

    A child that ends before it was ever ready is not started again: that is a start failure.
    """

    def __init__(
        self, spec: ProcessSpec, watchdog: Watchdog, report: Callable[[ProcessEvent], None]
    ) -> None:
        self.spec = spec
        self.state = ProcessState.STOPPED
        self.num_restarts = 0
        self._watchdog = watchdog
        self._report = report
        self._child: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._changed = asyncio.Condition()
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        self._failure = ""

    @property
    def name(self) -> str:
        """The child's name, as in its log file's."""
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the child and keep it alive from now on."""
        assert self._task is None, f"{self.name} is started already"
        self.state = ProcessState.STARTING
        self._task = asyncio.create_task(self._keep_alive(), name=f"supervise {self.name}")

    async def wait_ready(self, deadline_seconds: float) -> None:
        """Wait until the child is ready.

        Raises:
            StartFailed: it has ended for good, or is not ready in time; with its last log lines.
        """
        settled = {ProcessState.READY, ProcessState.FAILED, ProcessState.STOPPED}
        try:
            async with asyncio.timeout(deadline_seconds), self._changed:
                await self._changed.wait_for(lambda: self.state in settled)
        except TimeoutError:
            raise StartFailed(
                self._told(f"is not ready after {deadline_seconds:.0f} seconds")
            ) from None
        if self.state is not ProcessState.READY:
            raise StartFailed(self._told(self._failure or "was stopped"))

    def kill(self) -> None:
        """``kill -9`` the child, as a crash would; it is started again."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End the child: SIGTERM, then SIGKILL after a grace. Stopping twice changes nothing."""
        self._stopping.set()
        if self._task is not None:
            await self._task
            self._task = None

    # -- internals ------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        await self._set(ProcessState.STARTING)
        has_been_ready = False
        while not self._stopping.is_set():
            started = time.monotonic()
            await self._spawn()
            has_been_ready |= await self._follow(started)
            ended = await self._collect()
            if self._stopping.is_set():
                break
            if not has_been_ready:
                self._failure = f"could not start ({ended})"
                await self._set(ProcessState.FAILED, detail=ended)
                return
            await self._back_off(ended, time.monotonic() - started)
        await self._set(ProcessState.STOPPED)

    async def _spawn(self) -> None:
        self.spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log_path.open("ab") as log:
            try:
                self._child = await asyncio.create_subprocess_exec(
                    *self.spec.argv,
                    env={**os.environ, **self.spec.env},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                log.write(f"cannot run {self.spec.argv[0]}: {error}\n".encode())
                return
        self._watchdog.note(f"+{self._child.pid}")

    async def _follow(self, started: float) -> bool:
        """Until the child ends or is to be stopped; returns whether it has been ready."""
        if self._child is None:
            return False
        ends = [
            asyncio.create_task(self._child.wait()),
            asyncio.create_task(self._stopping.wait()),
        ]
        probing = asyncio.create_task(self._probe_until_ready())
        try:
            await asyncio.wait([*ends, probing], return_when=asyncio.FIRST_COMPLETED)
            is_ready = probing.done() and not any(task.done() for task in ends)
            if is_ready:
                await self._set(ProcessState.READY, time.monotonic() - started)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*ends, probing):
                task.cancel()
            await asyncio.gather(*ends, probing, return_exceptions=True)
        return is_ready

    async def _probe_until_ready(self) -> None:
        while not await self.spec.probe():  # noqa: ASYNC110 - another process cannot set an event
            await asyncio.sleep(_PROBE_EVERY_SECONDS)

    async def _collect(self) -> str:
        """See the child out (ending it where it still runs); says how it ended."""
        child = self._child
        if child is None:
            return "it cannot be run"
        if child.returncode is None:
            self._signal(child, signal.SIGTERM)
            try:
                await asyncio.wait_for(child.wait(), TERM_GRACE_SECONDS)
            except TimeoutError:
                self._signal(child, signal.SIGKILL)
        status = await child.wait()
        self._child = None
        self._watchdog.note(f"-{child.pid}")
        if status >= 0:
            return f"exit status {status}"
        return f"killed by {signal.Signals(-status).name}"

    @staticmethod
    def _signal(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)

    async def _back_off(self, ended: str, lived_seconds: float) -> None:
        if lived_seconds >= _CALM_SECONDS:
            self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        delay_seconds = self._backoff_seconds
        self._backoff_seconds = min(2 * delay_seconds, _LONGEST_BACKOFF_SECONDS)
        self.num_restarts += 1
        await self._set(ProcessState.RESTARTING, delay_seconds, ended)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_seconds)

    async def _set(self, state: ProcessState, seconds: float = 0.0, detail: str = "") -> None:
        async with self._changed:
            self.state = state
            self._changed.notify_all()
        self._report(ProcessEvent(self.name, state, seconds, detail))

    def _told(self, problem: str) -> str:
        lines = [f"{self.name} {problem}", *log_tail(self.spec.log_path)]
        return "\n  ".join(lines) + f"\nfull log: {self.spec.log_path}"


def log_tail(path: Path, num_lines: int = _NUM_TAIL_LINES) -> list[str]:
    """The last lines of a log, or none where there is none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-num_lines:]
