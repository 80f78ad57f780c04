"""Runs the GPU tests in a process of their own, and takes their results into the file.

Decides what a test run must show to count: something passed, nothing failed, and on a GPU nothing
was skipped unsaid. What is tested ``tests/gpu`` decides.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

from benchmarks.gpu.parts import Budget, Record, say
from benchmarks.gpu.supervised import ends_with_parent
from sangam_core.errors import SangamError

REPOSITORY = Path(__file__).parents[3]
_OPTIONS = (
    "-v", "-p", "no:cacheprovider", "--durations=15", "--continue-on-collection-errors",
    "-W", "default",
)  # fmt: skip
"""What warns on a machine of other versions is not what is checked here."""

_MOST_CHARACTERS = 400
_INTERRUPT_SECONDS = 15.0
_LOOK_SECONDS = 10.0
_TEST_SECONDS = "100"
"""Of one test: here kernels are compiled before, and one that hangs must not cost the rest."""


class TestsFailed(SangamError):
    """Some tests failed, or none ran."""


def run_tests(record: Record, budget: Budget, arguments: Sequence[str]) -> None:
    """Run pytest with its arguments, within the time.

    Raises:
        TestsFailed: with their names; the record has each one's message.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "report.xml", Path(folder) / "log"
        own = [*_OPTIONS, f"--junitxml={report}"]
        with log.open("wb") as file:
            process = _started([*arguments, *own], file)
        status = _status(process, log, record, budget)
        record["output"] = _lines(log)[-60:]
        record["passed"] = _num_passed(log)
        if report.exists():
            record |= _read_report(report)
    passed, failures = record["passed"], record.get("failures", {})
    ended = "pytest did not end in time" if status is None else f"status {status}"
    if status or status is None or not passed:
        raise TestsFailed(f"{passed} passed; {', '.join([*failures, ended])}")


def _started(arguments: Sequence[str], log: BinaryIO) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "GPU_TEST_SECONDS": _TEST_SECONDS},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=ends_with_parent,
    )


def _status(
    process: "subprocess.Popen[bytes]", log: Path, record: Record, budget: Budget
) -> int | None:
    """The exit status; ``None`` when it was interrupted, which pytest reports on all the same."""
    while (left := budget.left_seconds) > 0:
        try:
            return process.wait(min(_LOOK_SECONDS, max(1.0, left)))
        except subprocess.TimeoutExpired:
            record["passed"] = _num_passed(log)
            say(f"         {record['passed']} tests passed so far")
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(_INTERRUPT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()


def _num_passed(log: Path) -> int:
    """By the lines as they were written: a report shows an interrupted test as one that passed, and
    there is none of pytest's when it was killed."""
    return sum(re.search(r"::.* PASSED\b", line) is not None for line in _lines(log))


def _read_report(report: Path) -> Record:
    """What failing and skipped tests say."""
    failures, skips = {}, {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        skipped = case.find("skipped")
        if problem is not None:
            failures[name] = (problem.get("message") or "")[:_MOST_CHARACTERS]
        elif skipped is not None:
            skips[name] = (skipped.get("message") or "")[:_MOST_CHARACTERS]
    return {"failures": failures, "skipped": skips}
