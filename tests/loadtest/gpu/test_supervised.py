"""A process that a device takes with it is followed by another one, as long as that gets on."""

import json
import time
from pathlib import Path

import pytest

from benchmarks.gpu.supervised import BAD_OPTIONS, GO_ON, HAS_COMPLAINTS, supervised

COMMAND = """
import json, os, sys
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
