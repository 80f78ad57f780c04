"""Kernels that are missing are compiled before the port opens, and what that says."""

import os
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs
from tests.worker.flashinfer_installed import run_with_flashinfer, skip_without_ninja

from sangam_core.errors import ConfigurationError
from sangam_worker.flashinfer_kernels import make_ninja_found
from sangam_worker.kernels import compile_missing, num_compilers
from sangam_worker.progress import SILENT

GIB = 2**30


@dataclass
class Library:
    name: str
    is_compiled: bool = False


@pytest.fixture
def said() -> Iterator[list[Any]]:
    structlog.reset_defaults()
    with capture_logs() as entries:
        yield entries


@pytest.fixture(autouse=True)
def _no_jobs_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")


def compiled(kernels: Sequence[Library]) -> None:
    for kernel in kernels:
        kernel.is_compiled = True


def test_where_nothing_is_missing_nothing_is_built_or_said(said: list[Any]) -> None:
    def never(kernels: Sequence[Library]) -> None:
        raise AssertionError(kernels)

    compile_missing([], never, SILENT)
    assert said == []


def test_what_is_missing_is_compiled_and_the_log_says_where_it_is_kept(said: list[Any]) -> None:
    asked: list[str] = []

    def build(kernels: Sequence[Library]) -> None:
        asked.extend(kernel.name for kernel in kernels)
        compiled(kernels)

    libraries = [Library("fa2"), Library("fa3", is_compiled=True)]  # the latter is an old one
    compile_missing(libraries, build, SILENT, {"FLASHINFER_WORKSPACE_BASE": "/cache/flashinfer"})
    assert asked == ["fa2", "fa3"]
    (entry,) = said
    assert entry["kernels"] == ["fa2", "fa3"]
    assert entry["cache"] == "/cache/flashinfer/.cache/flashinfer"


class Counting:
    """Keeps what was advanced."""

    def __init__(self, done: threading.Event) -> None:
        self.total, self._done = 0.0, done

    def task(self, what: str, total: float, unit: str) -> Any:
        return self

    def __enter__(self) -> Any:
        return self.advance

    def __exit__(self, *error: object) -> None:
        pass

    def advance(self, amount: float) -> None:
        self.total += amount
        if self.total == 1:
            self._done.set()


def test_progress_follows_the_libraries_as_they_appear() -> None:
    first_was_seen = threading.Event()
    counting = Counting(first_was_seen)

    def build(kernels: Sequence[Library]) -> None:
        kernels[0].is_compiled = True
        assert first_was_seen.wait(20)
        kernels[1].is_compiled = True

    compile_missing([Library("fa2"), Library("fa3")], build, counting)
    assert counting.total == 2


def test_an_old_library_is_not_counted_before_it_is_built_again() -> None:
    first_was_seen = threading.Event()
    counting = Counting(first_was_seen)

    def build(kernels: Sequence[Library]) -> None:
        kernels[1].is_compiled = True
        assert first_was_seen.wait(20)

    compile_missing([Library("fa2", is_compiled=True), Library("fa3")], build, counting)
    assert counting.total == 1


NINJA = "Ninja build failed. Ninja output:\n[1/9] nvcc -O3 -c norm.cu\n"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(NINJA + "/bin/sh: nvcc: not found\n"), "nvcc: not found"),
        (
            RuntimeError(
                NINJA + "In file included from norm.cu:16:\ncudaUtils.h:25:10: fatal error: "
                "cublasLt.h: No such file or directory\n   25 | #include <cublasLt.h>\n"
            ),
            "cublasLt.h: No such file",
        ),
        (
            RuntimeError(
                NINJA + "/usr/bin/ld: cannot find -lcuda: No such file or directory\n"
                "collect2: error: ld returned 1 exit status\n"
            ),
            "cannot find -lcuda",
        ),
        (FileNotFoundError(2, "No such file or directory", "ninja"), "'ninja'"),
        (RuntimeError("JIT compilation is disabled"), "JIT compilation is disabled"),
    ],
)
def test_a_compiler_that_fails_is_a_configuration_error_of_one_line(
    error: Exception, expected: str
) -> None:
    def build(kernels: Sequence[Library]) -> None:
        raise error

    with pytest.raises(ConfigurationError) as refused:
        compile_missing([Library("fa2")], build, SILENT)
    said = str(refused.value)
    assert expected in said
    assert "SANGAM_ATTENTION to torch" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("num_cpus", "memory", "expected"),
    [(16, 128 * GIB, 16), (192, 48 * GIB, 12), (8, 2 * GIB, 1), (1, 64 * GIB, 1)],
)
def test_compilers_are_no_more_than_cpus_and_memory_allow(
    num_cpus: int, memory: int, expected: int
) -> None:
    assert num_compilers(num_cpus, memory) == expected


def test_what_a_pass_asks_flashinfer_for_is_what_is_compiled_before() -> None:
    done = run_with_flashinfer("tests.worker.flashinfer_asks_for")
    assert (done.returncode, done.stdout) == (0, "as expected\n"), done.stderr[-3000:]


def test_what_is_compiled_before_is_not_compiled_again_at_its_first_use() -> None:
    skip_without_ninja()
    done = run_with_flashinfer("tests.worker.flashinfer_builds")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("as expected\n")


def test_ninja_is_found_beside_a_python_that_is_not_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = Path(sysconfig.get_path("scripts"))
    monkeypatch.setenv("PATH", str(tmp_path))
    make_ninja_found()
    is_there = (scripts / "ninja").exists()
    assert os.environ["PATH"].split(os.pathsep) == [str(scripts)] * is_there + [str(tmp_path)]
    (tmp_path / "ninja").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    make_ninja_found()
    assert os.environ["PATH"] == str(tmp_path), "one that is found is left to be the one"
