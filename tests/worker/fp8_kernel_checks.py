"""What FP8 kernels must do, wherever they run: interpreted on a CPU, or on a GPU.

Each check takes ``run``, which calls a kernel by name with tensors of the CPU. Compared with the
torch reference: entries bit for bit where no exponential is in the way.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sangam_worker.models.fp8 import LARGEST, Fp8Rows
from sangam_worker.models.fp8_torch import TorchFp8Kernels

INF, NAN = torch.inf, torch.nan
EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = (3, 17, 100, 176, 512, 1000)

Run = Callable[[str, tuple[Any, ...]], tuple[Fp8Rows, tuple[Any, ...]]]


def random_rows(num_rows: int, width: int, seed: int = 0) -> Tensor:
    """Rows whose entries span what e4m3 does, and more."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(num_rows, width, generator=generator)
    return drawn * torch.logspace(-4, 1, width)[torch.randperm(width, generator=generator)]


def arguments_of(name: str, num_rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of a kernel that gives ``[num_rows, width]``."""
    x = random_rows(num_rows, width).to(dtype)
    weight = (1 + 0.3 * random_rows(1, width, seed=1)[0]).to(dtype)
    if name == "norm":
        return x, weight, EPS
    if name == "add_norm":
        return random_rows(num_rows, width, seed=2).to(dtype), x, weight, EPS
    if name == "silu_mul":
        return ((8 * random_rows(num_rows, 2 * width, seed=3)).to(dtype),)
    return (x,)


KERNELS = ("quantise", "norm", "add_norm", "silu_mul")


def compare(run: Run, name: str, arguments: tuple[Any, ...]) -> Fp8Rows:
    """The kernel's rows, once they and what it wrote elsewhere are as they should be."""
    expected_arguments = tuple(
        each.clone() if isinstance(each, Tensor) else each for each in arguments
    )
    expected = getattr(TorchFp8Kernels(), name)(*expected_arguments)
    got, got_arguments = run(name, arguments)
    for after, wanted in zip(got_arguments, expected_arguments, strict=True):
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(after, wanted, rtol=0, atol=0, equal_nan=True)
    assert got.values.dtype == expected.values.dtype
    assert got.values.shape == expected.values.shape
    assert got.scales.shape == expected.scales.shape == (len(got.values), 1)
    is_number = ~expected.wide().isnan().any(1)
    assert torch.equal(~got.wide().isnan().any(1), is_number)
    torch.testing.assert_close(got.scales[is_number], expected.scales[is_number], rtol=1e-5, atol=0)
    ours, theirs = (each.values[is_number].float() for each in (got, expected))
    if name == "silu_mul":
        torch.testing.assert_close(ours, theirs, rtol=2**-3, atol=2**-9)
        assert (ours != theirs).float().mean() <= 0.01
    else:
        assert torch.equal(ours, theirs)
    return got


def rows_of_any_width(run: Run) -> None:
    for name in KERNELS:
        for width in WIDTHS:
            for dtype in DTYPES:
                compare(run, name, arguments_of(name, 3, width, dtype))


def any_number_of_rows(run: Run) -> None:
    for name in KERNELS:
        for num_rows in (1, 2, 7, 33):
            compare(run, name, arguments_of(name, num_rows, 176, torch.bfloat16))


def the_largest_entry_becomes_the_largest_number(run: Run) -> None:
    for dtype, huge in ((torch.float32, 3e38), (torch.bfloat16, 3e38)):
        x = torch.tensor([[1.0, -2.0], [448.0, 1.0], [huge, -huge], [3e-30, 1e-31]], dtype=dtype)
        got = compare(run, "quantise", (x,))
        assert got.values.float().abs().amax(1).tolist() == [LARGEST] * 4
        assert got.wide().isfinite().all()


def rounding_never_goes_past_the_largest_number(run: Run) -> None:
    """The quotient by which rows are multiplied is itself rounded, up or down."""
    largest = torch.rand(400, 1, generator=torch.Generator().manual_seed(7)) + 0.1
    got = compare(run, "quantise", (torch.cat((largest, -largest, largest / 2), 1),))
    assert set(got.values.float().flatten().tolist()) == {LARGEST, -LARGEST, LARGEST / 2}


def rows_of_zeros_stay_zeros(run: Run) -> None:
    for name in KERNELS:
        arguments = arguments_of(name, 3, 100, torch.bfloat16)
        for each in arguments:
            if isinstance(each, Tensor) and each.dim() == 2:
                each[1] = 0
        got = compare(run, name, arguments)
        assert got.wide()[1].abs().max() == 0
        assert got.scales.isfinite().all()


def rows_with_infinities_or_what_is_no_number_stay_noticed(run: Run) -> None:
    """And the rows beside them are what they are without."""
    for name in KERNELS:
        for dtype in DTYPES:
            arguments = arguments_of(name, 6, 100, dtype)
            clean = compare(run, name, tuple(arguments_of(name, 6, 100, dtype)))
            rows = arguments[0]
            rows[1, 3], rows[3, 99], rows[4, 0] = NAN, INF, -INF
            got = compare(run, name, arguments)
            is_noticed = got.wide().isnan().any(1).tolist()
            assert is_noticed == [False, True, False, True, True, False]
            for row in (0, 2, 5):
                assert torch.equal(got[row : row + 1].wide(), clean[row : row + 1].wide())


CHECKS: Sequence[Callable[[Run], None]] = (
    rows_of_any_width,
    any_number_of_rows,
    the_largest_entry_becomes_the_largest_number,
    rounding_never_goes_past_the_largest_number,
    rows_of_zeros_stay_zeros,
    rows_with_infinities_or_what_is_no_number_stay_noticed,
)
