"""Compile the FlashInfer kernels that the gpu image brings along; its build runs this with nvcc.

Which kernels: paged prefill and decode attention for the head size and data type of LLaDA-8B and
Dream-7B, the writing of pages, norms, rotation and the gate: all that a worker asks for with them.
``python -m flashinfer.aot`` would compile much more, and from an installed package nothing at all:
it looks for the sources where FlashInfer's repository has them. Whatever a worker asks for beyond
these is compiled on first use and kept in its cache.

    FLASHINFER_CUDA_ARCH_LIST=9.0a python flashinfer_kernels.py
"""

import sys

import torch
from flashinfer.aot import copy_built_kernels, gen_fa2, gen_fa3
from flashinfer.jit import JitSpec, build_jit_specs
from flashinfer.jit import env as jit_env
from flashinfer.jit.activation import gen_act_and_mul_module
from flashinfer.jit.norm import gen_norm_module
from flashinfer.jit.page import gen_page_module
from flashinfer.jit.rope import gen_rope_module

HEAD_DIM = 128
DTYPE = torch.bfloat16


def wanted() -> list[JitSpec]:
    """One specification a shared library; names and contents are those asked for at run time."""
    plain = {"use_sliding_window": False, "use_logits_soft_cap": False}
    return [
        *gen_fa2(DTYPE, DTYPE, HEAD_DIM, HEAD_DIM, **plain),
        *gen_fa3(DTYPE, DTYPE, DTYPE, HEAD_DIM, HEAD_DIM, **plain),
        gen_page_module(),
        gen_norm_module(),
        gen_rope_module(),
        gen_act_and_mul_module("silu"),
    ]


def main() -> None:
    """Build, and put the libraries where FlashInfer looks before it compiles."""
    kernels = wanted()
    build_jit_specs(kernels, verbose=True, skip_prebuilt=False)
    copy_built_kernels(kernels, jit_env.FLASHINFER_AOT_DIR)
    for kernel in kernels:
        sys.stdout.write(f"compiled {kernel.aot_path}\n")


if __name__ == "__main__":
    main()
