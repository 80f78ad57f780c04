"""Rotation and the keeping of K and V in one kernel: interpreted against what it stands for, and
compiled for a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.flashinfer_formulas import rotate_and_keep
from tests.worker.interpreter import interpreted, needs_interpreter
from torch import Tensor

pytestmark = needs_interpreter

BFLOAT16 = torch.bfloat16
NUM_PAGES, NUM_POSITIONS = 9, 50


def arguments(
    num_heads: int, num_kv_heads: int, head_dim: int, num_rows: int, num_kept: int
) -> dict[str, Tensor]:
    """Rows anywhere, pages full of NaN; the last rows are padding."""
    angles = torch.rand(NUM_POSITIONS, head_dim // 2) * 6
    return {
        "qkv": torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim).to(BFLOAT16),
        "positions": torch.randint(NUM_POSITIONS, (num_rows,)),
        "table": torch.cat((angles.cos(), angles.sin()), -1),
        "pages": torch.full((NUM_PAGES, 2, 16, num_kv_heads, head_dim), torch.nan, dtype=BFLOAT16),
        "slots": torch.randperm(NUM_PAGES * 16)[:num_kept].int(),
    }


SHAPES = [(32, 32, 128), (28, 4, 128), (12, 4, 64), (7, 1, 64), (2, 2, 256)]


def test_the_interpreted_kernel_leaves_what_flashinfer_s_two_would() -> None:
    torch.manual_seed(0)
    with interpreted("tests.worker.rotation_interpreted:run") as run:
        for shape in SHAPES:
            for num_rows, num_kept in ((16, 16), (16, 3), (48, 37)):
                given = arguments(*shape, num_rows, num_kept)
                fed = given["qkv"].clone()
                qkv, pages = run(*given.values())
                rotate_and_keep(*given.values())
                num_heads = shape[0]
                near = {"rtol": 2**-7, "atol": 1e-6, "equal_nan": True}
                wanted = given["qkv"][:, :num_heads]
                torch.testing.assert_close(qkv[:, :num_heads], wanted, **near)  # type: ignore[arg-type]
                torch.testing.assert_close(pages, given["pages"], **near)  # type: ignore[arg-type]
                assert torch.equal(qkv[num_kept:], fed[num_kept:]), "padding"


def test_values_are_kept_bit_by_bit_and_nothing_else_on_the_pages_changes() -> None:
    with interpreted("tests.worker.rotation_interpreted:run") as run:
        given = arguments(28, 4, 128, 16, 11)
        _, pages = run(*given.values())
        page, slot = given["slots"].div(16, rounding_mode="floor").long(), given["slots"] % 16
        assert torch.equal(pages[page, 1, slot.long()], given["qkv"][:11, -4:])
        is_written = torch.zeros(NUM_PAGES, 16, dtype=torch.bool)
        is_written[page, slot.long()] = True
        assert torch.equal(pages.isfinite().all(-1).all(-1), is_written[:, None].expand(-1, 2, -1))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 32), (28, 4)])
def test_on_hopper_rows_are_read_and_written_16_bytes_at_a_time(
    num_heads: int, num_kv_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for sm_90 with what a call of a model's bf16 rows is compiled for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sangam_worker.models import rotation_triton as source

    kernel: Any = source.rotate_and_append_rows
    heads = source.heads_of_program(num_heads, num_kv_heads)
    types = {
        "qkv": "*bf16",
        "positions": "*i64",
        "table": "*fp32",
        "pages": "*bf16",
        "slots": "*i32",
    }
    constants = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "half": 64,
        "page_tokens": 16,
        "heads": heads,
    }
    names = kernel.arg_names
    aligned = [names.index(each) for each in ("qkv", "table", "pages")]
    compiled = triton.compile(
        ASTSource(
            kernel,
            {each: types.get(each, "constexpr") for each in names},
            constants,
            {(index,): [["tt.divisibility", 16]] for index in aligned},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": source.num_warps(heads, 128)},
    )
    lines = compiled.asm["ptx"].splitlines()
    stores = [line for line in lines if "st.global" in line]
    assert len(stores) == 6, "queries, keys, values: two halves each"
    assert all("st.global.v4.b32" in line for line in stores)
    loads = [line for line in lines if "ld.global" in line]
    assert sum("ld.global.v4.b32" in line for line in loads) == 2 + 4, "halves, and their angles"
    assert len(loads) == 6 + 2, "the row's position and its slot"
    assert not [line for line in lines if "bar.sync" in line], "threads wait for no others"
    assert not [line for line in lines if "st.local" in line]


def test_index_arrays_of_any_alignment_are_one_kernel() -> None:
    from sangam_worker.models import rotation_triton as source

    parameters = {each.name: each for each in source.rotate_and_append_rows.params}
    for name in ("positions", "slots"):
        assert parameters[name].do_not_specialize_on_alignment
