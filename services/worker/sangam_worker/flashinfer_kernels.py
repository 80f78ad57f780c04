"""Which of FlashInfer's kernels a model needs, as what compiles them; and a script for images.

Paged and ragged prefill attention (decode blocks of 32 queries are prefills to FlashInfer), the
writing of pages, norms, rotation and the gate: all that a worker asks for. ``start`` has what is
missing compiled before a worker's port opens. The gpu image's build runs this file alone, with
nvcc, so that a worker of LLaDA-8B or Dream-7B finds everything there; it imports nothing of
Sangam's, for no code is there yet:

    FLASHINFER_CUDA_ARCH_LIST=9.0a python flashinfer_kernels.py

(``python -m flashinfer.aot`` would compile much more, and from an installed package nothing at all:
it looks for the sources where FlashInfer's repository has them.)
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

HEAD_DIM = 128
"""Of LLaDA-8B and Dream-7B."""

DTYPE = torch.bfloat16

_ASK_SECONDS = 60.0
"""Longest time for ninja to look at a kernel's sources: the cache may be on a network's disk."""

_BUILT_FOR = "built_for"
"""File beside an image's kernels: the GPUs they are for, as FlashInfer names its cache's folder."""


def wanted(head_dim: int = HEAD_DIM, backends: Sequence[str] = ("fa2", "fa3")) -> list[Any]:
    """One of FlashInfer's ``JitSpec`` a shared library; names are those asked for at run time.

    Args:
        head_dim: of the kernels: 64, 128 or 256. backends: of attention.
    """
    make_ninja_found()
    jit = import_module("flashinfer.jit")
    attention = [
        jit.gen_batch_prefill_module(
            backend=backend,
            dtype_q=DTYPE,
            dtype_kv=DTYPE,
            dtype_o=DTYPE,
            dtype_idx=torch.int32,
            head_dim_qk=head_dim,
            head_dim_vo=head_dim,
            pos_encoding_mode=0,
            use_sliding_window=False,
            use_logits_soft_cap=False,
            use_fp16_qk_reduction=False,
        )
        for backend in backends
    ]
    return [
        *attention,
        import_module("flashinfer.jit.page").gen_page_module(),
        import_module("flashinfer.jit.norm").gen_norm_module(),
        import_module("flashinfer.jit.rope").gen_rope_module(),
        import_module("flashinfer.jit.activation").gen_act_and_mul_module("silu"),
    ]


def make_ninja_found() -> None:
    """FlashInfer runs ninja at a kernel's first use; it came along, beside this Python."""
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts):
        os.environ["PATH"] = os.pathsep.join((scripts, os.environ.get("PATH", os.defpath)))


def missing(kernels: Sequence[Any]) -> list[Any]:
    """Those that FlashInfer would compile, or compile again, at their first use."""
    _pass_over_others_kernels()
    return [kernel for kernel in kernels if not (kernel.is_aot or _is_current(kernel))]


def build(kernels: Sequence[Any]) -> None:
    """Compile, side by side. ``RuntimeError`` with the compiler's words when that fails.

    A kernel's first use asks ninja in the kernel's own folder whether it is up to date, while
    those that are built together are logged in the folder above: without its logs each would be
    compiled once more. The build of one kernel that follows is what a first use does.
    """
    import_module("flashinfer.jit").build_jit_specs(list(kernels), verbose=False)
    together = Path(import_module("flashinfer.jit.env").FLASHINFER_JIT_DIR)
    for kernel in kernels:
        for log in together.glob(".ninja_*"):
            _replace(kernel.build_dir / log.name, log)
        kernel.build(need_lock=True)


def _pass_over_others_kernels() -> None:
    """Have FlashInfer not take what an image brings for other GPUs: it does not look at that."""
    env: Any = import_module("flashinfer.jit.env")
    built_for = Path(env.FLASHINFER_AOT_DIR) / _BUILT_FOR
    if built_for.exists() and built_for.read_text("ascii") != env.FLASHINFER_WORKSPACE_DIR.name:
        env.FLASHINFER_AOT_DIR = built_for / "nothing"


def _is_current(kernel: Any) -> bool:
    """Whether it is in the cache, and ninja, asked as at a first use, finds nothing to do."""
    if not kernel.is_compiled or shutil.which("ninja") is None:
        return False
    try:
        kernel.write_ninja()
        command = ["ninja", "-n", "-C", str(kernel.build_dir), "-f", str(kernel.ninja_path)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ASK_SECONDS
        )
    except (OSError, RuntimeError, subprocess.TimeoutExpired):
        return False  # no compiler, or nowhere to write: as ``build`` will say
    return "no work to do" in done.stdout


def _replace(path: Path, by: Path) -> None:
    """At once, as another worker may read it."""
    copy = path.with_name(f"{path.name}.{os.getpid()}")
    shutil.copyfile(by, copy)
    copy.replace(path)


def main() -> None:
    """Build, and put the libraries where FlashInfer looks before it compiles."""
    kernels = wanted()
    import_module("flashinfer.jit").build_jit_specs(kernels, verbose=True, skip_prebuilt=False)
    env = import_module("flashinfer.jit.env")
    import_module("flashinfer.aot").copy_built_kernels(kernels, env.FLASHINFER_AOT_DIR)
    built_for = Path(env.FLASHINFER_AOT_DIR) / _BUILT_FOR
    built_for.write_text(env.FLASHINFER_WORKSPACE_DIR.name, "ascii")
    for kernel in kernels:
        sys.stdout.write(f"compiled {kernel.aot_path}\n")


if __name__ == "__main__":
    main()
