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
from xml.etree import ElementTree

from benchmarks.gpu.parts import Budget, Record
from sangam_core.errors import SangamError

REPOSITORY = Path(__file__).parents[3]
_OPTIONS = (
    "-q", "-p", "no:cacheprovider", "--durations=15", "--continue-on-collection-errors",
    "-W", "default",
)  # fmt: skip
"""What warns on a machine of other versions is not what is checked here."""

_MOST_CHARACTERS = 400
_INTERRUPT_SECONDS = 15.0


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
        status = _status([sys.executable, "-m", "pytest", *arguments, *own], log, budget)
        record["output"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
        record["passed"] = _num_passed(record["output"])
        if report.exists():
            record |= _read_report(report)
    passed, failures = record["passed"], record.get("failures", {})
    ended = "pytest did not end in time" if status is None else f"status {status}"
    if status or status is None or not passed:
        raise TestsFailed(f"{passed} passed; {', '.join([*failures, ended])}")


def _status(command: Sequence[str], log: Path, budget: Budget) -> int | None:
    """The exit status; ``None`` when it was interrupted, which pytest reports on all the same."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(max(1.0, budget.left_seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(_INTERRUPT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return None


def _num_passed(output: Sequence[str]) -> int:
    """By pytest's last line: its report shows an interrupted test as it shows one that passed."""
    found = re.search(r"\b(\d+) passed", output[-1]) if output else None
    return int(found[1]) if found else 0


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
