"""Kernels that are compiled here for a GPU machine: archives, and what is compiled with."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.worker.flashinfer_installed import run_with_flashinfer, skip_without_ninja

from benchmarks.gpu.carried_kernels import archive_name, complete, unpack, write_archive

REPOSITORY = Path(__file__).parents[3]
TOOLKIT = REPOSITORY / ".sangam" / "toolkit" / "nvidia" / "cu13"
SILU_AND_MUL = """
import ctypes, sys
sys.modules["cutlass"] = None
import tvm_ffi
from sangam_worker.flashinfer_kernels import build, missing, wanted
kernel = wanted()[-1]
build(missing([kernel]))
assert missing([kernel]) == []
ctypes.CDLL(sys.argv[1] + "/lib/libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
assert tvm_ffi.load_module(str(kernel.jit_library_path)).implements_function("silu_and_mul")
"""


def libraries(folder: Path, *names: str) -> dict[str, Path]:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f"library {name}", encoding="utf-8")
    return {name: folder / name for name in names}


def test_what_is_packed_is_unpacked_where_flashinfer_looks_for_it(tmp_path: Path) -> None:
    archive, aot = tmp_path / "flashinfer-1.tar.xz", tmp_path / "data" / "aot"
    write_archive(archive, libraries(tmp_path / "built", "page", "norm"))
    unpack(archive, aot)
    found = {str(file.relative_to(aot)): file.read_text() for file in aot.rglob("*.so")}
    assert found == {"page/page.so": "library page", "norm/norm.so": "library norm"}


def test_an_archive_replaces_older_ones_as_all_of_a_folder_is_carried(tmp_path: Path) -> None:
    of_one = libraries(tmp_path / "built", "page")
    (tmp_path / "flashinfer_python-1.whl").touch()
    write_archive(tmp_path / "flashinfer-1.tar.xz", of_one)
    write_archive(tmp_path / "flashinfer-2.tar.xz", of_one)
    left = {each.name for each in tmp_path.iterdir()} - {"built"}
    assert left == {"flashinfer_python-1.whl", "flashinfer-2.tar.xz"}


def test_without_an_archive_for_the_machine_nothing_is_unpacked_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unpack(tmp_path / "flashinfer-1.tar.xz", tmp_path / "aot")
    assert not (tmp_path / "aot").exists()
    assert "compiled here" in capsys.readouterr().out


def test_an_archive_is_named_by_all_that_it_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"flashinfer-python": "0.6.18", "apache-tvm-ffi": "0.1.15"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    name = archive_name("9.0a", 13)
    assert name == "flashinfer-0.6.18-tvmffi-0.1.15-cuda13-sm90a-x86_64.tar.xz"
    assert len({name, archive_name("10.0a", 13), archive_name("9.0a", 12)}) == 3


def test_flashinfer_finds_what_was_compiled_for_it_elsewhere() -> None:
    skip_without_ninja()
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    done = run_with_flashinfer("tests.loadtest.gpu.prebuilt")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("as expected\n")


def test_a_toolkit_of_packages_gets_what_they_lack_once(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    for folder in ("include", "lib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "include" / "cublasLt.h").write_text("the real one", encoding="utf-8")
    (tmp_path / "lib" / "libcudart.so.13").touch()
    for _ in range(2):
        complete(tmp_path)
        assert (tmp_path / "lib64" / "libcudart.so").samefile(tmp_path / "lib" / "libcudart.so.13")
        assert (tmp_path / "lib64" / "stubs" / "libcuda.so").read_bytes().startswith(b"\x7fELF")
        assert (tmp_path / "include" / "cublas_v2.h").exists()
        assert (tmp_path / "include" / "cublasLt.h").read_text(encoding="utf-8") == "the real one"


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_kernel_is_compiled_for_an_h200_and_can_be_loaded(tmp_path: Path) -> None:
    if not TOOLKIT.exists():
        pytest.skip("CUDA's compilers are not here; `make gpu-kernels` fetches them")
    complete(TOOLKIT)
    environment = {
        "CUDA_HOME": str(TOOLKIT),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SILU_AND_MUL, str(TOOLKIT)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.integration
def test_carried_kernels_take_the_arguments_of_a_pass() -> None:
    archives = [*(REPOSITORY / "wheels").glob("flashinfer-*-cuda13-sm90a-x86_64.tar.xz")]
    if not archives or not TOOLKIT.exists():
        pytest.skip("no kernels are compiled here; `make gpu-kernels` does that")
    done = run_with_flashinfer("tests.loadtest.gpu.called", str(archives[0]), str(TOOLKIT / "lib"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("as expected\n")
