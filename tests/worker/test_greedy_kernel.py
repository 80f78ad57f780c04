"""The greedy kernel without a GPU: interpreted against torch, and compiled for one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.worker.greedy_kernel_checks import CHECKS
from tests.worker.interpreter import interpreted_kernel, needs_interpreter

from sangam_worker.sampling.greedy import GreedyKernel

pytestmark = needs_interpreter


@pytest.fixture(scope="module")
def kernel() -> Iterator[GreedyKernel]:
    with interpreted_kernel() as started:
        yield started


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_interpreted_kernel_gives(
    check: Callable[[GreedyKernel], None], kernel: GreedyKernel
) -> None:
    check(kernel)


@pytest.mark.parametrize("num_columns", [2, 4])
def test_on_hopper_a_thread_has_16_bytes_copied_at_a_time_ahead_of_their_use(
    num_columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for sm_90 with what a call of a model's contiguous bf16 logits is compiled for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sangam_worker.sampling import greedy_kernel as source

    constants = {
        "entry_stride": 1,
        "num_columns": num_columns,
        "chunk_entries": source.CHUNK_ENTRIES,
        "chunks_in_flight": source.CHUNKS_IN_FLIGHT,
    }
    types = {
        "logits": "*bf16",
        "row_stride": "i32",
        "vocab_size": "i32",
        "mask_id": "i32",
        "summary": "*fp64",
    }
    names = source.read_row.arg_names
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]] for name in types if name != "mask_id"
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    compiled = triton.compile(
        ASTSource(source.read_row, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": source.NUM_WARPS},
    )
    assembly = compiled.asm["ptx"]
    assert "cp.async.cg.shared.global" in assembly
    assert "ld.global.v8.b16" not in assembly
    assert assembly.count("ld.global.b16") <= 1  # the mask token's
    assert "cubin" in compiled.asm
