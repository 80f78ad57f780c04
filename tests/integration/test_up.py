"""``sangam up`` as a newcomer uses it: a command in a terminal, its snippets, Ctrl-C."""

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sangam_router.local.ports import free_ports

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

UP_SECONDS = 120.0
END_SECONDS = 30.0
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}


class Up:
    """A running ``sangam up`` and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.printed = ""

    async def read_until(
        self, mark: str, deadline_seconds: float = UP_SECONDS, *, times: int = 1
    ) -> str:
        """Read on until the output holds ``mark`` so often (or ends); returns all of it."""
        assert self.process.stdout is not None
        async with asyncio.timeout(deadline_seconds):
            while self.printed.count(mark) < times:
                line = await self.process.stdout.readline()
                if not line:
                    break
                self.printed += line.decode()
        return self.printed

    async def end(self, number: signal.Signals | None = None) -> int:
        """Send a signal, read the rest, and return the exit status."""
        if number is not None:
            self.process.send_signal(number)
        await self.read_until("\0", END_SECONDS)
        async with asyncio.timeout(END_SECONDS):
            return await self.process.wait()

    def children(self) -> set[int]:
        """Processes that it has started."""
        return {pid for pid in running_pids() if parent_of(pid) == self.process.pid}


def running_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def is_running(pid: int) -> bool:
    """Whether it exists and is no zombie (whose parent, here init's stand-in, may not reap)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def gone(pids: set[int]) -> None:
    async with asyncio.timeout(END_SECONDS):
        while any(map(is_running, pids)):  # noqa: ASYNC110 - other processes, polled
            await asyncio.sleep(0.05)


@asynccontextmanager
async def sangam_up(
    folder: Path, *options: str, port: int | None = None, **env: str
) -> AsyncIterator[Up]:
    public, internal = free_ports(2)
    command = [sys.executable, "-m", "sangam_router.local.cli", "up"]
    command += ["--port", str(port or public), "--internal-port", str(internal), *options]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=ENV | env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield Up(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def output_of(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=ENV
    )
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


def printed_program(printed: str) -> str:
    found = re.search(r"^from openai import.*?^print\(\)$", printed, re.MULTILINE | re.DOTALL)
    assert found, printed
    return found.group()


async def test_what_it_prints_works_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    async with sangam_up(tmp_path) as up:
        printed = await up.read_until("Ctrl-C stops everything.")
        assert "Ctrl-C stops everything." in printed, printed
        children = up.children()
        assert len(children) == 5, "redis, router, two workers and the watchdog"

        assert "17 + 25 = 42" in await output_of(sys.executable, "-c", printed_program(printed))
        if shutil.which("curl"):
            line = next(line for line in printed.splitlines() if line.startswith("curl "))
            assert "17 + 25 = 42" in await output_of("bash", "-c", line)
        url = re.search(r"sangam chat --url (\S+)", printed)
        assert url
        chat = f"echo 'What is 17 + 25?' | {sys.executable} -m sangam_router.local.cli chat"
        assert "17 + 25 = 42" in await output_of("bash", "-c", f"{chat} --url {url.group(1)}")

        assert await up.end(signal.SIGINT) == 0
        assert up.printed.rstrip().endswith("stopped")
        await gone(children)
        told = re.search(r"^  logs: (.+)$", printed, re.MULTILINE)
        assert told
        logs = tmp_path / told.group(1)
        assert logs.parent == tmp_path / ".sangam" / "logs", "a folder of its port"
        assert sorted(path.name for path in logs.iterdir()) == [
            "redis.log",
            "router-0.log",
            "worker-0.log",
            "worker-1.log",
        ]


async def test_a_worker_that_dies_is_reported_and_started_again(tmp_path: Path) -> None:
    async with sangam_up(tmp_path, "--colocated", "1") as up:
        await up.read_until("Ctrl-C stops everything.")
        worker = next(pid for pid in up.children() if b"sangam_worker" in command_of(pid))
        os.kill(worker, signal.SIGKILL)
        printed = await up.read_until("worker-0: ready", times=2)
        assert "worker-0: restarting in 0.25 s: it has ended (killed by SIGKILL)" in printed
        assert await up.end(signal.SIGTERM) == 0


async def test_killing_it_leaves_nothing(tmp_path: Path) -> None:
    async with sangam_up(tmp_path, "--colocated", "1") as up:
        await up.read_until("Ctrl-C stops everything.")
        children = up.children()
        assert len(children) == 4
        up.process.kill()
        await up.process.wait()
        await gone(children)


async def test_ctrl_c_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    async with sangam_up(tmp_path, "--colocated", "1") as up:
        await up.read_until("worker-0: starting")
        children = up.children()
        assert await up.end(signal.SIGINT) == 0
        assert "Sangam is up" not in up.printed
        await gone(children)


async def test_a_model_that_does_not_exist_stops_the_start_with_the_reason(tmp_path: Path) -> None:
    async with sangam_up(tmp_path, "--model", "./no-such-model") as up:
        assert await up.end() == 1
        assert "error: " in up.printed
        assert "no-such-model" in up.printed.partition("error: ")[2]
        assert not up.children()


async def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        async with sangam_up(tmp_path, port=port) as up:
            assert await up.end() == 1
            assert f"port {port} on 127.0.0.1 is taken; choose another with --port" in up.printed
            assert not (tmp_path / ".sangam").exists()


async def test_a_mix_of_roles_that_cannot_serve_is_refused_with_advice(tmp_path: Path) -> None:
    async with sangam_up(tmp_path, "--prefill", "2") as up:
        assert await up.end() == 1
        assert "add --decode N or --colocated N" in up.printed


async def test_a_mistyped_variable_is_told_before_anything_starts(tmp_path: Path) -> None:
    nowhere = ("--redis-url", "redis://127.0.0.1:1/0")
    async with sangam_up(tmp_path, *nowhere, SANGAM_THETA="512") as up:
        assert await up.end() == 1
        first, *rest = up.printed.splitlines()
        assert first == (
            "SANGAM_THETA: there is no such setting, so it is ignored; "
            "did you mean SANGAM_THETA_TOKENS?"
        )
        assert "no Redis answers" in "".join(rest)
