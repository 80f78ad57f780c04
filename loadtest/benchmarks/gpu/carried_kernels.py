"""FlashInfer's kernels, compiled where there is time and carried to a GPU machine.

    python -m benchmarks.gpu.carried_kernels pack wheels TOOLKIT   # make gpu-kernels; needs no GPU
    python -m benchmarks.gpu.carried_kernels unpack wheels         # run.sh, on the GPU machine

Compiling FA3 takes minutes of a GPU's time on 16 cores. The libraries are no Python's: they need
libcudart of CUDA's major version, FlashInfer's Python of the same version and its tvm-ffi, and a
GPU of the architecture. All that is in the archive's name, so that an archive that does not fit is
not found, and what is not found is compiled as ever. Unpacked they lie where FlashInfer looks
before it compiles; what cannot be loaded from there it compiles, too.
"""

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

_HEAD_DIMS = (128, 64)
"""Of the benchmarks' models, and of the small ones that ``tests/gpu`` has."""

_NOT_USED = ("cublasLt.h", "cublas_v2.h")
"""Headers that norm.cu includes and uses nothing of; their package has 400 MB."""


def archive_name(architecture: str, cuda_major: int | str) -> str:
    """For the FlashInfer that is installed; ``architecture`` as in ``9.0a``."""
    flashinfer, tvm_ffi = map(metadata.version, ("flashinfer-python", "apache-tvm-ffi"))
    return (
        f"flashinfer-{flashinfer}-tvmffi-{tvm_ffi}-cuda{cuda_major}"
        f"-sm{architecture.replace('.', '')}-{platform.machine()}.tar.xz"
    )


def write_archive(archive: Path, libraries: Mapping[str, Path]) -> None:
    """Write libraries by their names; archives for another FlashInfer beside it go."""
    for old in archive.parent.glob("flashinfer-*.tar.xz"):
        old.unlink()
    part = archive.with_suffix(".part")
    with tarfile.open(part, "w:xz") as tar:
        for name, library in libraries.items():
            tar.add(library, f"{name}/{name}.so")
    part.replace(archive)


def complete(toolkit: Path) -> None:
    """Make a toolkit of CUDA's packages one that FlashInfer can compile and link with."""
    libraries = toolkit / "lib"
    if not (toolkit / "lib64").exists():
        (toolkit / "lib64").symlink_to("lib")
    if not (libraries / "libcudart.so").exists():
        (libraries / "libcudart.so").symlink_to(next(libraries.glob("libcudart.so.*")).name)
    for header in _NOT_USED:
        (toolkit / "include" / header).touch()
    stub = libraries / "stubs" / "libcuda.so"
    if not stub.exists():
        stub.parent.mkdir(exist_ok=True)
        # Of the driver, of which no kernel here calls a function.
        command = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull]
        subprocess.run([*command, "-o", str(stub)], check=True)


def pack(folder: Path, toolkit: Path) -> None:
    """Compile what the benchmarks and tests need into an archive in ``folder``."""
    complete(toolkit)
    os.environ["CUDA_HOME"] = str(toolkit)
    from flashinfer.jit.cpp_ext import get_cuda_version

    from sangam_worker import flashinfer_kernels
    from sangam_worker.kernels import compile_missing
    from sangam_worker.progress import LoggedReports

    by_name = {
        kernel.name: kernel
        for head_dim in _HEAD_DIMS
        for kernel in flashinfer_kernels.wanted(head_dim)
    }
    missing = flashinfer_kernels.missing([*by_name.values()])
    compile_missing(missing, flashinfer_kernels.build, LoggedReports())
    folder.mkdir(exist_ok=True)
    name = archive_name(os.environ["FLASHINFER_CUDA_ARCH_LIST"], get_cuda_version().major)
    libraries = {name: kernel.jit_library_path for name, kernel in by_name.items()}
    write_archive(folder / name, libraries)
    sys.stdout.write(f"{folder / name}: {(folder / name).stat().st_size / 1e6:.1f} MB\n")


def unpack(archive: Path, target: Path) -> None:
    """Unpack an archive, if it is there, to where FlashInfer looks; say which of the two."""
    if not archive.exists():
        sys.stdout.write(f"there is no {archive}: FlashInfer's kernels are compiled here\n")
        return
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    sys.stdout.write(f"FlashInfer's kernels are those of {archive}\n")


def name_here() -> str:
    """Of the archive for this machine's first GPU."""
    import torch

    if not torch.cuda.is_available():
        return archive_name("none", "none")
    major, minor = torch.cuda.get_device_capability()
    cuda_major = (torch.version.cuda or "none").partition(".")[0]
    return archive_name(f"{major}.{minor}a", cuda_major)


def prebuilt_folder() -> Path:
    """Where the installed FlashInfer looks for libraries before it compiles."""
    package = importlib.util.find_spec("flashinfer")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "data" / "aot"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="carried_kernels")
    commands = parser.add_subparsers(required=True, dest="command")
    packing = commands.add_parser("pack", help="compile, and write an archive")
    packing.add_argument("folder", type=Path)
    packing.add_argument("toolkit", type=Path, help="packages' folder nvidia/cu13")
    unpacking = commands.add_parser("unpack", help="unpack the archive that fits this machine")
    unpacking.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "pack":
        pack(given.folder.resolve(), given.toolkit.resolve())
    else:
        unpack(given.folder / name_here(), prebuilt_folder())


if __name__ == "__main__":
    main()
