"""Kernels are compiled in waves, each in a process; failures are told, and waiting has an end."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.gpu.kernels import (
    OF_MODELS,
    OF_TESTS,
    Commands,
    Compilation,
    flashinfer_waves,
    nothing,
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def waves(*each: dict[str, list[str]]) -> Callable[[], Sequence[Commands]]:
    return lambda: each


SLOW = "import time; time.sleep(60)"
BAD = "print('nvcc: no such file'); raise SystemExit(3)"


def test_each_kernel_is_compiled_in_a_process_and_a_failure_has_its_last_lines() -> None:
    compilation = Compilation(waves({"good": python("pass"), "bad": python(BAD)}))
    compilation.wait(OF_MODELS, 30)
    assert compilation.is_ready(OF_MODELS)
    assert set(compilation.seconds) == {"good", "bad"}
    assert compilation.errors == {"bad": "nvcc: no such file"}
    assert compilation.complaint(OF_MODELS) == "failed: bad"
    assert compilation.complaint(0) == ""


def test_a_compiler_that_is_killed_is_told() -> None:
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    compilation = Compilation(waves({"killed": python(dies)}))
    compilation.wait(OF_MODELS, 30)
    assert compilation.errors == {"killed": "status -9"}


def test_the_tests_kernels_come_after_the_models_and_nobody_waits_for_them(tmp_path: Path) -> None:
    first = f"import pathlib; pathlib.Path({str(tmp_path / 'first')!r}).touch()"
    second = (
        f"import pathlib, sys; sys.exit(not pathlib.Path({str(tmp_path / 'first')!r}).exists())"
    )
    both = waves({"first": python(first)}, {"second": python(second), "slow": python(SLOW)})
    compilation = Compilation(both)
    compilation.wait(OF_MODELS, 30)
    assert compilation.is_ready(OF_MODELS)
    compilation.wait(OF_TESTS, 0.2)
    assert not compilation.is_ready(OF_TESTS)
    while "second" not in compilation.seconds:
        time.sleep(0.01)
    assert not compilation.errors
    compilation.stop()


def test_without_fa3_there_is_fa2() -> None:
    compilation = Compilation(waves({"fa2": python("pass"), "fa3_sm90": python(BAD)}))
    compilation.wait(OF_MODELS, 30)
    assert not compilation.has_fa3
    assert compilation.complaint(OF_MODELS) == ""


def test_fa3_is_given_up_when_it_takes_too_long() -> None:
    both = waves({"fa2": python("pass"), "fa3_sm90": python(SLOW)})
    compilation = Compilation(both, fa3_seconds=0.0)
    compilation.wait(OF_MODELS, 30)
    assert compilation.is_ready(OF_MODELS)
    assert not compilation.has_fa3
    compilation.stop()


def test_fa3_of_the_tests_says_nothing_of_the_models() -> None:
    compilation = Compilation(waves({"fa3_sm90": python("pass")}, {"64_sm90": python(BAD)}))
    compilation.wait(OF_TESTS, 30)
    assert compilation.has_fa3
    assert compilation.complaint(OF_TESTS) == ""


def test_waiting_for_kernels_has_an_end_and_they_can_be_stopped(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = "import os, pathlib, subprocess, sys, time\n"
    code += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    code += f"pathlib.Path({str(file)!r}).write_text(str(child.pid))\n"
    code += "time.sleep(60)"
    compilation = Compilation(waves({"slow": python(code)}))
    started = time.monotonic()
    compilation.wait(OF_MODELS, 0.01)
    assert not compilation.is_ready(OF_MODELS)
    while not (file.exists() and file.read_text()):
        time.sleep(0.01)
    compilation.stop()
    assert compilation.is_ready(OF_MODELS)
    assert time.monotonic() - started < 30
    assert compilation.errors == {}
    while is_running(int(file.read_text())):  # its compiler goes with it
        assert time.monotonic() - started < 30
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_where_flashinfer_is_not_used_nothing_is_waited_for() -> None:
    compilation = Compilation(nothing)
    compilation.wait(OF_TESTS, 30)
    assert compilation.is_ready(OF_TESTS)
    assert not compilation.complaint(OF_TESTS)


def test_a_machine_without_flashinfer_measures_what_does_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise ImportError('no CUDA here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    compilation = Compilation(flashinfer_waves)
    compilation.wait(OF_TESTS, 60)
    assert compilation.is_ready(OF_TESTS)
    assert "no CUDA here" in compilation.errors["all"]
    assert compilation.complaint(OF_MODELS) == "failed: all"
