"""Compiles what is missing of FlashInfer's kernels before a worker takes requests.

Compiling takes minutes, in which a first request would seem to hang: it happens at the start, with
progress, and is kept in FlashInfer's cache (``FLASHINFER_WORKSPACE_BASE``). Decides how many
compilers run at a time: each takes gigabytes, and a container has fewer than its node. Called by
``start``; which kernels there are is ``flashinfer_kernels``' business.
"""

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from sangam_core.errors import ConfigurationError
from sangam_worker.progress import Reports

log = structlog.get_logger(__name__)

_COMPILER_BYTES = 4 * 2**30
"""Of one nvcc on FlashInfer's attention templates, generously."""

_LOOK_SECONDS = 1.0

_SAYS_WHY = re.compile(r"\b(error|fatal)\b|not found|No such file", re.IGNORECASE)

_CGROUP = Path("/sys/fs/cgroup")


class Kernel(Protocol):
    """One shared library; FlashInfer's ``JitSpec``."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def is_compiled(self) -> bool:
        """Whether it came with the installation or is in the cache, be it an old one."""
        ...


KernelT = TypeVar("KernelT", bound=Kernel)


def compile_missing(
    missing: Sequence[KernelT],
    build: Callable[[Sequence[KernelT]], None],
    reports: Reports,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Have kernels compiled, and say how many are done. Nothing is said where none is missing.

    Raises:
        ConfigurationError: the compiler failed, or there is none.
    """
    if not missing:
        return
    base = Path(environment.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    log.info(
        "FlashInfer kernels are compiled, which takes minutes, and kept",
        kernels=[kernel.name for kernel in missing],
        cache=str(base / ".cache" / "flashinfer"),
    )
    os.environ.setdefault("MAX_JOBS", str(num_compilers(_num_cpus(), _memory_bytes())))
    failures: list[BaseException] = []
    work = threading.Thread(
        target=_caught, args=(build, missing, failures), name="kernels", daemon=True
    )
    with reports.task("kernels compiled", len(missing), "libraries") as advance:
        num_done = 0
        absent = [kernel for kernel in missing if not kernel.is_compiled]
        work.start()
        while work.is_alive():
            work.join(_LOOK_SECONDS)
            num_now = sum(kernel.is_compiled for kernel in absent)
            advance(num_now - num_done)
            num_done = num_now
        if failures:
            raise ConfigurationError(_complaint(failures[0])) from failures[0]


def num_compilers(num_cpus: int, memory_bytes: int) -> int:
    """Compilers that may run at a time: no more than there are CPUs and memory for."""
    return max(1, min(num_cpus, memory_bytes // _COMPILER_BYTES))


def _caught(
    build: Callable[[Sequence[KernelT]], None],
    kernels: Sequence[KernelT],
    failures: list[BaseException],
) -> None:
    try:
        build(kernels)
    except Exception as error:  # noqa: BLE001 - handed to the thread that waits
        failures.append(error)


def _complaint(error: BaseException) -> str:
    """One line; a compiler's output is long, and its first error says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next(iter([*filter(_SAYS_WHY.search, lines), *lines]), type(error).__name__)
    return (
        f"FlashInfer's kernels cannot be compiled: {said[:300]}; install the CUDA toolkit of "
        "torch's CUDA version (nvcc, and the headers of cuBLAS and cuRAND), a C++ compiler and "
        "ninja, or set SANGAM_ATTENTION to torch"
    )


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int:
    """What this process may use: its container's limit, else the machine's memory."""
    try:
        return int((_CGROUP / "memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
