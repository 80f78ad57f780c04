"""Runs the GPU tests in a process of their own, and takes their results into the file.

Decides what a test run must show to count: something passed, nothing failed, and on a GPU nothing
was skipped unsaid. What is tested ``tests/gpu`` decides.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.parts import Budget, Record
from sangam_core.errors import SangamError

REPOSITORY = Path(__file__).parents[3]
_MOST_CHARACTERS = 400


class TestsFailed(SangamError):
    """Some tests failed, or none ran."""


def run_tests(record: Record, budget: Budget, paths: list[str]) -> None:
    """Run pytest on the paths, within the time.

    Raises:
        TestsFailed: with their names; the record has each one's message.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *paths, "-q", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, f"--junitxml={report}", "--durations=10"],
                cwd=REPOSITORY,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                capture_output=True,
                text=True,
                timeout=max(1.0, budget.left_seconds),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            said = error.stdout or b""
            text = said.decode(errors="replace") if isinstance(said, bytes) else said
            record["output"] = text.splitlines()[-20:]
            raise TestsFailed("pytest did not end in time") from None
        record["output"] = (done.stdout + done.stderr).splitlines()[-30:]
        if report.exists():
            _read_report(record, report)
    if done.returncode or not record.get("passed"):
        failures = ", ".join(record.get("failures", {})) or f"status {done.returncode}"
        raise TestsFailed(f"{record.get('passed', 0)} passed; {failures}")


def _read_report(record: Record, report: Path) -> None:
    """Counts, and what failing and skipped tests say."""
    failures, skips, passed = {}, {}, 0
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        skipped = case.find("skipped")
        if problem is not None:
            failures[name] = (problem.get("message") or "")[:_MOST_CHARACTERS]
        elif skipped is not None:
            skips[name] = (skipped.get("message") or "")[:_MOST_CHARACTERS]
        else:
            passed += 1
    record |= {"passed": passed, "failures": failures, "skipped": skips}
