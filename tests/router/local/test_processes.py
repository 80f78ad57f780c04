"""One supervised child: readiness, restart, start failure, stop, and the watchdog."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sangam_router.local.processes import (
    ProcessEvent,
    ProcessSpec,
    ProcessState,
    StartFailed,
    SupervisedProcess,
    Watchdog,
)

DEADLINE_SECONDS = 20.0

SERVES = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
IGNORES_TERM = (
    "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
)


class Child:
    """A supervised Python one-liner; ready once it has touched its flag file."""

    def __init__(self, folder: Path, program: str, watchdog: Watchdog) -> None:
        self.flag = folder / "ready"
        self.events: list[ProcessEvent] = []
        spec = ProcessSpec(
            name="child",
            argv=(sys.executable, "-c", program, str(self.flag)),
            log_path=folder / "logs" / "child.log",
            probe=self.is_ready,
        )
        self.process = SupervisedProcess(spec, watchdog, self.events.append)

    async def is_ready(self) -> bool:
        return self.flag.exists()

    def states(self) -> list[ProcessState]:
        return [event.state for event in self.events]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the state of processes, polled
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
async def watchdog() -> AsyncIterator[Watchdog]:
    dog = Watchdog()
    await dog.start()
    yield dog
    await dog.stop()


async def test_a_childis_ready_when_its_probe_says_so(tmp_path: Path, watchdog: Watchdog) -> None:
    child = Child(tmp_path, SERVES, watchdog)
    child.process.start()
    await child.process.wait_ready(DEADLINE_SECONDS)
    assert child.flag.exists()
    await child.process.stop()
    assert child.states() == [ProcessState.STARTING, ProcessState.READY, ProcessState.STOPPED]


async def test_a_killed_child_is_reported_and_started_again(
    tmp_path: Path, watchdog: Watchdog
) -> None:
    child = Child(tmp_path, SERVES, watchdog)
    child.process.start()
    await child.process.wait_ready(DEADLINE_SECONDS)
    first = child.process.pid
    child.process.kill()
    await until(lambda: ProcessState.RESTARTING in child.states())
    await child.process.wait_ready(DEADLINE_SECONDS)
    assert child.process.pid not in (None, first)
    assert child.process.num_restarts == 1
    restarting = next(e for e in child.events if e.state is ProcessState.RESTARTING)
    assert restarting.detail == "killed by SIGKILL"
    await child.process.stop()


async def test_waits_between_restarts_grow(tmp_path: Path, watchdog: Watchdog) -> None:
    child = Child(tmp_path, "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()", watchdog)
    child.flag.touch()
    child.process.start()
    restarts = lambda: [e.seconds for e in child.events if e.state is ProcessState.RESTARTING]  # noqa: E731
    await until(lambda: len(restarts()) == 3)
    await child.process.stop()
    first, second, third = restarts()
    assert second == 2 * first
    assert third == 2 * second


async def test_a_child_that_ends_before_itis_ready_fails_with_its_last_words(
    tmp_path: Path, watchdog: Watchdog
) -> None:
    child = Child(tmp_path, "import sys; sys.exit('no such model')", watchdog)
    child.process.start()
    with pytest.raises(StartFailed, match=r"child could not start \(exit status 1\)") as raised:
        await child.process.wait_ready(DEADLINE_SECONDS)
    assert "no such model" in str(raised.value)
    await child.process.stop()


async def test_a_program_that_does_not_exist_fails_to_start(
    tmp_path: Path, watchdog: Watchdog
) -> None:
    child = Child(tmp_path, "", watchdog)
    spec = ProcessSpec("ghost", ("/no/such/program",), tmp_path / "ghost.log", child.is_ready)
    process = SupervisedProcess(spec, watchdog, child.events.append)
    process.start()
    with pytest.raises(StartFailed, match="cannot run /no/such/program"):
        await process.wait_ready(DEADLINE_SECONDS)
    await process.stop()


async def test_a_child_that_is_not_ready_in_time_says_how_long_it_had(
    tmp_path: Path, watchdog: Watchdog
) -> None:
    child = Child(tmp_path, "import time; time.sleep(600)", watchdog)
    child.process.start()
    with pytest.raises(StartFailed, match="is not ready after 0 seconds"):
        await child.process.wait_ready(0.3)
    await child.process.stop()


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(
    tmp_path: Path, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sangam_router.local.processes.TERM_GRACE_SECONDS", 0.3)
    child = Child(tmp_path, IGNORES_TERM, watchdog)
    child.process.start()
    await child.process.wait_ready(DEADLINE_SECONDS)
    pid = child.process.pid
    assert pid is not None
    await child.process.stop()
    assert not is_alive(pid)


async def test_stopping_interrupts_the_wait_before_a_restart(
    tmp_path: Path, watchdog: Watchdog
) -> None:
    child = Child(tmp_path, SERVES, watchdog)
    child.process.start()
    await child.process.wait_ready(DEADLINE_SECONDS)
    child.process.kill()
    await until(lambda: child.process.state is ProcessState.RESTARTING)
    await child.process.stop()
    assert child.process.state is ProcessState.STOPPED
    assert child.process.pid is None


OWNER = """
import asyncio, pathlib, sys
from sangam_router.local.processes import ProcessSpec, SupervisedProcess, Watchdog

async def is_ready():
    return True

async def main(folder):
    dog = Watchdog()
    await dog.start()
    argv = (sys.executable, "-c", "import time; time.sleep(600)")
    process = SupervisedProcess(
        ProcessSpec("child", argv, folder / "child.log", is_ready), dog, lambda event: None
    )
    process.start()
    await process.wait_ready(20)
    print(process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main(pathlib.Path(sys.argv[1])))
"""


async def test_children_die_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        async with asyncio.timeout(DEADLINE_SECONDS):
            child = int(await owner.stdout.readline())
        assert is_alive(child)
    finally:
        owner.kill()
        await owner.wait()
    await until(lambda: not is_alive(child))
