"""Test results are taken over with each failure's words; nothing that ran no test counts."""

import threading
from pathlib import Path

import pytest

from benchmarks.gpu.correctness import TestsFailed as Failed
from benchmarks.gpu.correctness import run_tests
from benchmarks.gpu.parts import Budget, Record

MIXED = """
import pytest
def test_good(): pass
def test_bad(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="no GPU here")
def test_skipped(): pass
"""


class UntilThere(Budget):
    """Time until a file is there, and a little more; two minutes at most."""

    def __init__(self, file: Path) -> None:
        super().__init__(120.0)
        self._file = file
        self._num_asked = 0

    @property
    def left_seconds(self) -> float:
        while not self._file.exists() and self.used_seconds < 100:
            threading.Event().wait(0.05)
        self._num_asked += 1
        return 2.0 - self._num_asked


def found_in(tmp_path: Path, text: str, seconds: float = 60.0) -> tuple[Record, str]:
    file = tmp_path / "test_it.py"
    file.write_text(text)
    record: Record = {}
    with pytest.raises(Failed) as raised:
        run_tests(record, Budget(seconds), [str(file)])
    return record, str(raised.value)


def test_failures_and_skips_are_told(tmp_path: Path) -> None:
    record, message = found_in(tmp_path, MIXED)
    assert record["passed"] == 1
    assert "one is not two" in record["failures"]["test_it::test_bad"]
    assert "no GPU here" in record["skipped"]["test_it::test_skipped"]
    assert "1 passed; test_it::test_bad" in message


def test_only_skipped_tests_prove_nothing(tmp_path: Path) -> None:
    text = "import pytest\npytestmark = pytest.mark.skip(reason='no GPU')\ndef test_a(): pass\n"
    record, message = found_in(tmp_path, text)
    assert record["passed"] == 0
    assert "0 passed" in message


def test_tests_that_do_not_end_are_interrupted_and_those_before_count(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    text = f"import pathlib, time\ndef test_a(): pathlib.Path({str(ready)!r}).touch()\n"
    text += "def test_slow(): time.sleep(600)\n"
    (tmp_path / "test_it.py").write_text(text)
    record: Record = {}
    with pytest.raises(Failed, match="did not end in time"):
        run_tests(record, UntilThere(ready), [str(tmp_path / "test_it.py")])
    assert record["passed"] == 1
