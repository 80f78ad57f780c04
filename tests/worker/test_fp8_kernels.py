"""The FP8 kernels without a GPU: interpreted against torch, and compiled for one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.fp8_kernel_checks import CHECKS, Run, random_rows
from tests.worker.interpreter import interpreted, needs_interpreter

from sangam_worker.models.fp8 import DTYPE, Fp8Rows, quantise
from sangam_worker.models.fp8_torch import TorchFp8Kernels

pytestmark = needs_interpreter


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with interpreted("tests.worker.fp8_interpreted:run") as call:

        def run(name: str, arguments: tuple[Any, ...]) -> tuple[Fp8Rows, tuple[Any, ...]]:
            values, scales, after = call(name, arguments)
            return Fp8Rows(values.view(DTYPE), scales), after

        yield run


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_interpreted_kernels_give(check: Callable[[Run], None], run: Run) -> None:
    check(run)


KERNEL_WIDTHS = [
    ("quantise_row", 3584),
    ("norm_row", 4096),
    ("add_norm_row", 4096),
    ("silu_mul_row", 12288),
    ("silu_mul_row", 18944),
]


@pytest.mark.parametrize(("name", "width"), KERNEL_WIDTHS)
def test_on_hopper_rows_are_read_and_written_16_bytes_at_a_time_and_rounded_by_one_instruction(
    name: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for sm_90 with what a call of a model's bf16 rows is compiled for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sangam_worker.models import fp8_triton as source

    kernel: Any = getattr(source, name)
    matrices = ("x", "added", "weight", "gate_up")
    types = dict.fromkeys(matrices, "*bf16") | {
        "values": "*fp8e4nv",
        "scales": "*fp32",
        "eps": "fp32",
    }
    constants = {"width": width, "lanes": source.num_lanes(width)}
    names = kernel.arg_names
    compiled = triton.compile(
        ASTSource(
            kernel,
            {each: types.get(each, "constexpr") for each in names},
            constants,
            {
                (names.index(each),): [["tt.divisibility", 16]]
                for each in names
                if each in types and each != "eps"
            },
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": source.num_warps(width)},
    )
    assembly = compiled.asm["ptx"]
    loads = [line for line in assembly.splitlines() if "ld.global" in line]
    assert loads
    assert all("ld.global.v4.b32" in line for line in loads)
    assert "st.global.v4.b32" in assembly
    assert "cvt.rn.satfinite.e4m3x2.f32" in assembly
    assert "st.local" not in assembly


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_gpus_product_called_on_a_cpu_is_the_references(has_bias: bool) -> None:
    """``torch._scaled_mm`` has a CPU kernel: it takes the arguments and means the same by them."""
    from sangam_worker.models.fp8_triton import ScaledProduct

    weight, rows = quantise(random_rows(48, 64)), quantise(random_rows(32, 64, seed=1))
    bias = random_rows(1, 48, seed=2)[0].bfloat16() if has_bias else None
    product = ScaledProduct(weight, bias, torch.bfloat16)
    try:
        got = product(rows)
    except NotImplementedError:
        pytest.skip("this torch multiplies e4m3 on GPUs only")
    expected = TorchFp8Kernels().product(weight, bias, torch.float32)(rows)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=2**-7, atol=1e-4)
