"""Triton's kernels of gate, rotation and the keeping of K and V, on a real GPU.

Held against what FlashInfer's own compute, by the formula, on a CPU; as wide and as many rows as
the models have.
"""

import pytest
import torch
import torch.nn.functional as F
from tests.worker.flashinfer_formulas import rotate_and_keep as by_formula

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # of Triton's compiler, not ours
]

BFLOAT16 = torch.bfloat16
NUM_POSITIONS = 300


@pytest.mark.parametrize("width", [12288, 18944, 2048])
@pytest.mark.parametrize("num_rows", [1, 32, 257, 2048])
def test_the_gate_rounds_the_formula_once(num_rows: int, width: int) -> None:
    from sangam_worker.models.gate_triton import silu_and_mul

    gate_up = (4 * torch.randn(num_rows, 2 * width, device="cuda")).to(BFLOAT16)
    gate, up = gate_up.float().chunk(2, 1)
    got = silu_and_mul(gate_up)
    torch.testing.assert_close(got.float(), F.silu(gate) * up, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 32, 128), (28, 4, 128), (12, 4, 64)]
)
@pytest.mark.parametrize(("num_rows", "num_kept"), [(32, 32), (48, 33), (2048, 2041)])
def test_rows_are_rotated_and_kept_as_by_flashinfer_s_two_kernels(
    num_rows: int, num_kept: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Index arrays that start between 16 bytes, as they do in an iteration's upload."""
    from sangam_worker.models.rotation_triton import rotate_and_keep

    torch.manual_seed(0)
    angles = torch.rand(NUM_POSITIONS, head_dim // 2) * 6
    num_pages = num_kept // 16 + 2
    pages = torch.full((num_pages, 2, 16, num_kv_heads, head_dim), torch.nan, dtype=BFLOAT16)
    given = {
        "qkv": torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim).to(BFLOAT16),
        "positions": torch.randint(NUM_POSITIONS, (num_rows + 1,))[1:],
        "table": torch.cat((angles.cos(), angles.sin()), -1),
        "pages": pages,
        "slots": torch.randperm(num_pages * 16)[: num_kept + 1].int()[1:],
    }
    on_gpu = {name: each.cuda() for name, each in given.items()}
    for name in ("positions", "slots"):
        shifted = torch.empty(len(given[name]) + 1, dtype=given[name].dtype, device="cuda")[1:]
        on_gpu[name] = shifted.copy_(given[name])
    rotate_and_keep(**on_gpu)
    by_formula(**given)
    near = {"rtol": 2**-7, "atol": 1e-2, "equal_nan": True}
    queries = slice(0, num_heads)
    torch.testing.assert_close(on_gpu["qkv"][:, queries].cpu(), given["qkv"][:, queries], **near)
    torch.testing.assert_close(on_gpu["pages"].cpu(), given["pages"], **near)
    kept_values = on_gpu["pages"][:, 1].cpu().nan_to_num(9.0)
    assert torch.equal(kept_values, given["pages"][:, 1].nan_to_num(9.0)), "bit by bit"
