"""A process that a device takes with it is followed by another one, as long as that gets on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.supervised import (
    BAD_OPTIONS,
    GO_ON,
    HAS_COMPLAINTS,
    TERMINATED,
    supervise,
    supervised,
)

COMMAND = """
import json, os, signal, sys
from pathlib import Path

def main():
    folder = Path(sys.argv[1])
    statuses = json.loads((folder / "statuses").read_text())
    with (folder / "calls").open("a") as calls:
        calls.write(" ".join(sys.argv[2:]) + "\\n")
    count = len((folder / "calls").read_text().splitlines())
    status, num_parts = statuses[count - 1]
    parts = {str(n): {"status": "done", "found": {}} for n in range(num_parts)}
    (folder / "results.json").write_text(json.dumps({"parts": parts}))
    if status < 0:
        os.kill(os.getpid(), -status)
    return status

def hangs():
    parts = {"passes": {"status": "done", "found": {}}, "slow": {"status": "running", "found": {}}}
    Path(sys.argv[1], "results.json").write_text(json.dumps({"parts": parts}))
    signal.pause()

def write_files(folder):
    parts = json.loads((folder / "results.json").read_text())["parts"]
    lines = (f"{name}: {part['status']}" for name, part in parts.items())
    (folder / "table.md").write_text(", ".join(lines))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_command.py").write_text(COMMAND.replace("\\\\n", "\\n"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "a_command"


def run(tmp_path: Path, module: str, *endings: tuple[int, int]) -> tuple[int, list[str]]:
    """Exit status, and the options of each process, which ends with (status, parts done)."""
    (tmp_path / "statuses").write_text(json.dumps(endings))
    results = tmp_path / "results.json"
    results.write_text('{"parts": {"of an old run": {"status": "running", "found": {}}}}')
    status = supervised(module, [str(tmp_path)], 300.0, results)
    return status, (tmp_path / "calls").read_text().splitlines()


@pytest.mark.parametrize("status", [0, BAD_OPTIONS, HAS_COMPLAINTS])
def test_a_process_that_ran_to_its_end_is_the_only_one(
    tmp_path: Path, module: str, status: int
) -> None:
    ended, calls = run(tmp_path, module, (status, 3))
    assert ended == status
    assert len(calls) == 1
    assert "--resume" not in calls[0]


def test_a_lost_device_and_a_crash_are_followed_by_a_process_that_resumes(
    tmp_path: Path, module: str
) -> None:
    begun = time.monotonic()
    ended, calls = run(tmp_path, module, (GO_ON, 1), (-11, 2), (HAS_COMPLAINTS, 3))
    passed_seconds = time.monotonic() - begun
    assert ended == HAS_COMPLAINTS
    assert [call.endswith("--resume") for call in calls] == [False, True, True]
    seconds = [float(call.split()[1]) for call in calls]
    # Less each time, but by no more than what passed, however slow the machine (to a millisecond).
    assert 300 >= seconds[0] > seconds[1] > seconds[2] >= 300 - passed_seconds - 0.001


def test_processes_that_get_no_further_are_not_tried_again(tmp_path: Path, module: str) -> None:
    ended, calls = run(tmp_path, module, (1, 1), (1, 1), (0, 9))
    assert ended == HAS_COMPLAINTS
    assert len(calls) == 2
    assert (tmp_path / "table.md").read_text() == "0: done"


def test_a_process_that_is_killed_leaves_a_table_of_what_it_found(
    tmp_path: Path, module: str
) -> None:
    text = COMMAND.replace("def main()", "def returns()").replace("def hangs()", "def main()")
    (tmp_path / f"{module}.py").write_text(text)
    results = tmp_path / "results.json"
    assert supervised(module, [str(tmp_path)], 4.0, results, grace_seconds=0) == HAS_COMPLAINTS
    assert (tmp_path / "table.md").read_text() == "passes: done, slow: failed"


def test_a_process_whose_interpreter_would_not_end_ends(tmp_path: Path, module: str) -> None:
    text = f"import atexit, time\natexit.register(time.sleep, 600)\n{COMMAND}"
    (tmp_path / f"{module}.py").write_text(text)
    begun = time.monotonic()
    assert run(tmp_path, module, (0, 3))[0] == 0
    assert time.monotonic() - begun < 60


def test_a_table_that_cannot_be_written_is_said(
    tmp_path: Path, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"{module}.py"
    file.write_text(file.read_text().partition("def write_files")[0])
    assert run(tmp_path, module, (1, 0))[0] == HAS_COMPLAINTS
    assert f"no table of {tmp_path / 'results.json'}" in capsys.readouterr().err


def test_without_torch_one_line_says_what_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert supervise("a_command", ["--help"], str(tmp_path), "bench-gpu") == BAD_OPTIONS
    told = capsys.readouterr().err
    assert told == (
        f"torch is not installed for {sys.executable}; name a Python that has it: "
        "make bench-gpu PYTHON=...\n"
    )


ENDLESS = """
import json, signal, subprocess, sys
from pathlib import Path

def main():
    code = "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    parts = {"passes": {"status": "done", "found": {}}, "slow": {"status": "running", "found": {}}}
    folder = Path(sys.argv[1])
    (folder / "results.json").write_text(json.dumps({"parts": parts}))
    (folder / "child.part").write_text(str(child.pid))
    (folder / "child.part").rename(folder / "child")
    signal.pause()
"""


def until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def endless(tmp_path: Path, module: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A command under way that would not end, and neither would what it has started."""
    writing = COMMAND[COMMAND.index("def write_files") :]
    (tmp_path / f"{module}.py").write_text(ENDLESS + writing)
    code = "import sys; from pathlib import Path; from benchmarks.gpu.supervised import supervised;"
    code += f"sys.exit(supervised({module!r}, sys.argv[1:], 300.0, Path(sys.argv[2])))"
    results = str(tmp_path / "results.json")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), results], env=os.environ | {"PYTHONPATH": paths}
    )
    until((tmp_path / "child").exists)
    yield process
    process.kill()
    process.wait()


def test_sigterm_leaves_a_table_and_nothing_that_runs(
    tmp_path: Path, endless: "subprocess.Popen[bytes]"
) -> None:
    endless.terminate()
    assert endless.wait(60) == TERMINATED
    assert (tmp_path / "table.md").read_text() == "passes: done, slow: failed"
    child = int((tmp_path / "child").read_text())
    until(lambda: not is_running(child))


def test_a_command_ends_with_its_supervisor(
    tmp_path: Path, endless: "subprocess.Popen[bytes]"
) -> None:
    children = Path(f"/proc/{endless.pid}/task/{endless.pid}/children").read_text().split()
    endless.kill()
    until(lambda: not any(is_running(int(pid)) for pid in children))
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
