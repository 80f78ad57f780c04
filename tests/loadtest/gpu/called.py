"""Carried kernels, asked as a pass asks them: do the compiled libraries take our arguments?

Run as a process of its own by ``test_carried_kernels``, with an archive and libcudart's folder.
Without a GPU a library looks at number and types of its arguments and at what its C++ checks before
it launches: all it may say is that there is no GPU. The answers are the stand-ins' of
``flashinfer_on_cpu``.
"""

import ctypes
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["FLASHINFER_WORKSPACE_BASE"] = tempfile.mkdtemp()
os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"
os.environ["FLASHINFER_DISABLE_JIT"] = "1"

from flashinfer import activation, norm, page, prefill, rope
from flashinfer.jit import env
from tests.worker import flashinfer_on_cpu as on_cpu

from benchmarks.gpu.carried_kernels import unpack

NO_GPU = ("driver version is insufficient", "must be a CUDA tensor")
PLAN_NUMBERS = {"fa2": 15, "fa3": 9}
"""How many a plan has; the stand-in's has fewer."""

ASKED_FOR = {
    *(
        f"{kernel}.{name}"
        for kernel in PLAN_NUMBERS
        for name in ("plan", "paged_run", "ragged_run")
    ),
    "fa2.workspace_size",
    "page.append_paged_kv_cache",
    "rope.apply_rope_pos_ids_cos_sin_cache",
    "norm.rmsnorm",
    "norm.fused_add_rmsnorm",
    "activation.silu_and_mul",
}

asked: Counter[str] = Counter()


class Both:
    """A compiled module that is asked first, and a stand-in that answers."""

    def __init__(self, name: str, compiled: Any, stand_in: Any) -> None:
        self._name, self._compiled, self._stand_in = name, compiled, stand_in

    def __getattr__(self, function: str) -> Callable[..., Any] | None:
        compiled, stand_in = (getattr(each, function) for each in (self._compiled, self._stand_in))
        assert (compiled is None) == (stand_in is None), function
        if stand_in is None:
            return None

        def call(*args: Any) -> Any:
            asked[f"{self._name}.{function}"] += 1
            refused_for_want_of_a_gpu(compiled, self._planned(function, args))
            return stand_in(*args)

        return call

    def _planned(self, function: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not function.endswith("_run"):
            return args
        return (*args[:2], [1] * PLAN_NUMBERS[self._name], *args[3:])


def refused_for_want_of_a_gpu(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        function(*args)
    except Exception as error:
        if not any(words in str(error) for words in NO_GPU):
            raise
        return
    raise AssertionError(f"{function} ran without a GPU")


def put_both() -> None:
    """Where ``flashinfer_on_cpu`` puts its stand-ins."""
    getters = [
        (prefill, "get_batch_prefill_module", None),
        (page, "get_page_module", "page"),
        (rope, "get_rope_module", "rope"),
        (norm, "get_norm_module", "norm"),
        (activation, "get_act_and_mul_module", "activation"),
    ]
    compiled = [getattr(module, getter) for module, getter, _ in getters]
    on_cpu.stand_in()
    for get_compiled, (module, getter, name) in zip(compiled, getters, strict=True):
        setattr(module, getter, _both_of(name, get_compiled, getattr(module, getter)))


def _both_of(
    name: str | None, get_compiled: Callable[..., Any], get_stand_in: Callable[..., Any]
) -> Callable[..., Both]:
    def get(*args: Any) -> Both:
        return Both(name or args[0], get_compiled(*args), get_stand_in(*args))

    return get


def main(archive: Path, cuda_libraries: Path) -> None:
    ctypes.CDLL(str(next(cuda_libraries.glob("libcudart.so.*"))), mode=ctypes.RTLD_GLOBAL)
    env.FLASHINFER_AOT_DIR = Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / "aot"
    unpack(archive, env.FLASHINFER_AOT_DIR)
    put_both()
    for seed in range(4):
        for head_dim in (64, 128):
            on_cpu.check_attention(head_dim, 6, 2, seed)
    for seed in range(2):
        on_cpu.check_fixed_attention(6, 2, seed)
    for name in ("random:llada-100m", "random:dream-7b"):
        on_cpu.check_operators(name)
    assert set(asked) == ASKED_FOR, set(asked) ^ ASKED_FOR
    sys.stdout.write("as expected\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[2:4]))
