"""``make test-gpu``: where a test cannot run, the run fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.timeout(300)  # processes that import torch, on a busy machine
ROOT = Path(__file__).parents[1]

A_GPU = """
from tests.gpu.conftest import *
import tests.gpu.conftest as required
required.what_is_missing = lambda: None
required.describe_machine = lambda: "1 x a GPU"
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_fails_and_says_so() -> None:
    done = subprocess.run(
        ["make", "test-gpu", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode != 0
    assert "there is no GPU that torch" in done.stdout + done.stderr
    assert "passed" not in done.stdout


WITHOUT_TORCH = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "torch" else found(name, *more)
"""


@pytest.mark.parametrize(
    "command",
    [
        ("make", "--silent", "test-gpu", f"PYTHON={sys.executable}"),
        (sys.executable, "-m", "pytest", "-q", "--confcutdir=tests/gpu", "tests/gpu"),
    ],
)
def test_a_python_without_torch_is_told_in_one_line(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    assert lines[0] == (
        f"torch is not installed for {sys.executable}; name a Python that has it: "
        "make test-gpu PYTHON=..."
    )
    assert "Traceback" not in done.stdout + done.stderr


def folder_with(folder: Path, *tests: str) -> str:
    (folder / "conftest.py").write_text(A_GPU)
    file = folder / "test_it.py"
    file.write_text("import pytest\n\n" + "\n".join(tests))
    return str(file)


PASSES = "def test_passes(): pass"
SKIPS = 'def test_skips(): pytest.skip("needs the extra gpu")'
OTHER = 'def test_other(): pytest.skip("needs two CUDA devices")'


@pytest.mark.parametrize(
    ("tests", "status", "line"),
    [
        ([PASSES], 0, "1 passed"),
        ([PASSES, OTHER], 0, "1 skipped: needs two CUDA devices (other hardware)"),
        ([PASSES, SKIPS], 1, "1 skipped: needs the extra gpu (FAILS THE RUN)"),
        ([PASSES, "def test_fails(): raise ValueError"], 1, "1 failed"),
    ],
)
def test_a_skip_counts_as_a_failure_unless_it_asks_for_other_hardware(
    tmp_path: Path, tests: list[str], status: int, line: str
) -> None:
    done = run(folder_with(tmp_path, *tests), "--require-gpu", "--rootdir", str(ROOT))
    assert done.returncode == status, done.stdout + done.stderr
    assert line in done.stdout
    assert "1 x a GPU" in done.stdout


def test_a_machine_without_pytest_timeout_runs_them_too(tmp_path: Path) -> None:
    marked = "@pytest.mark.timeout(9)\n" + PASSES
    done = run(folder_with(tmp_path, marked), "--require-gpu", "-p", "no:timeout")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_without_the_option_a_skip_is_a_skip(tmp_path: Path) -> None:
    done = run(folder_with(tmp_path, SKIPS), "--rootdir", str(ROOT))
    assert done.returncode == 0
    assert "1 skipped" in done.stdout
