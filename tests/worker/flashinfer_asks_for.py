"""What the real FlashInfer would compile in a pass, held against what is compiled before one.

Run as a process of its own by ``test_kernels``; the compiled modules are stand-ins.
"""

import os
import sys
import tempfile
from typing import Any

os.environ["FLASHINFER_WORKSPACE_BASE"] = tempfile.mkdtemp()
os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"

from flashinfer import prefill
from flashinfer.jit import gen_batch_prefill_module
from tests.worker import flashinfer_on_cpu as on_cpu

from sangam_worker.flashinfer_kernels import wanted


def names_asked_for(head_dims: tuple[int, ...]) -> set[str]:
    """The attention kernels of some passes on both backends: paged, ragged, for graphs."""
    asked: set[str] = set()

    def module(backend: str, *args: Any) -> on_cpu.AttentionKernels:
        asked.add(gen_batch_prefill_module(backend, *args).name)
        return on_cpu.AttentionKernels(backend)

    on_cpu.stand_in()
    prefill.get_batch_prefill_module = module
    for head_dim in head_dims:
        for seed in range(6):
            on_cpu.check_attention(head_dim, 4, 4, seed)
    for seed in range(2):
        on_cpu.check_fixed_attention(4, 4, seed)
    return asked


def main() -> None:
    asked = names_asked_for((64, 128))
    compiled = {kernel.name for head_dim in (64, 128) for kernel in wanted(head_dim)}
    assert len(asked) == 4, asked
    assert asked <= compiled, asked - compiled
    rest = {name for name in compiled if not name.startswith("batch_prefill")}
    assert rest == {"page", "norm", "rope", "silu_and_mul"}, rest
    sys.stdout.write("as expected\n")


if __name__ == "__main__":
    main()
