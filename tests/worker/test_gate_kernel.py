"""SiLU-mul's kernel without a GPU: interpreted against torch, and compiled for one."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.worker.interpreter import interpreted, needs_interpreter

pytestmark = needs_interpreter

BFLOAT16 = torch.bfloat16


def test_the_interpreted_kernel_rounds_the_formula_once() -> None:
    with interpreted("tests.worker.gate_interpreted:run") as run:
        for dtype in (torch.float32, BFLOAT16):
            for num_rows, width in ((1, 8), (3, 1000), (2, 1024), (5, 2500), (33, 176)):
                gate_up = (4 * torch.randn(num_rows, 2 * width)).to(dtype)
                gate_up[0, 0], gate_up[0, 1] = 200.0, -200.0  # its exponential overflows
                got = run(gate_up)
                gate, up = gate_up.float().chunk(2, 1)
                assert got.dtype == dtype
                assert got.shape == (num_rows, width)
                unit = torch.finfo(dtype).eps
                torch.testing.assert_close(
                    got.float(), (F.silu(gate) * up), rtol=max(unit, 1e-5), atol=1e-6
                )


def test_a_row_that_is_no_number_spoils_no_other() -> None:
    with interpreted("tests.worker.gate_interpreted:run") as run:
        gate_up = torch.randn(4, 64).to(BFLOAT16)
        clean = run(gate_up)
        gate_up[1, 40], gate_up[2, 3] = torch.nan, torch.inf
        got = run(gate_up)
        assert torch.equal(got[[0, 3]], clean[[0, 3]])
        assert not got[1].isfinite().all()
        assert not got[2].isfinite().all()


@pytest.mark.parametrize("width", [12288, 18944])
def test_on_hopper_both_halves_are_read_and_the_result_written_16_bytes_at_a_time(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for sm_90 with what a call of a model's bf16 rows is compiled for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sangam_worker.models import gate_triton as source

    compiled = triton.compile(
        ASTSource(
            source.silu_mul_part,
            {
                "result": "*bf16",
                "gate_up": "*bf16",
                "width": "constexpr",
                "part_entries": "constexpr",
            },
            {"width": width, "part_entries": source.PART_ENTRIES},
            {(index,): [["tt.divisibility", 16]] for index in (0, 1)},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": source.NUM_WARPS},
    )
    assembly = compiled.asm["ptx"]
    loads, stores = (
        [line for line in assembly.splitlines() if word in line]
        for word in ("ld.global", "st.global")
    )
    assert len(loads) == 2
    assert all("ld.global.v4.b32" in line for line in loads)
    assert len(stores) == 1
    assert "st.global.v4.b32" in stores[0]
    assert "st.local" not in assembly
