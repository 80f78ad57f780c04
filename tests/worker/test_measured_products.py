"""Products by a measured algorithm, and cuBLASLt's calls on a fake of its bindings."""

import sys
from collections.abc import Callable
from importlib.machinery import BuiltinImporter
from types import ModuleType
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from tests.worker import cublaslt_fake
from tests.worker.cublaslt_fake import FakeCublasLt
from torch import Tensor

from sangam_worker.models import cublaslt
from sangam_worker.models.cublaslt import CublasLt, Shape
from sangam_worker.models.flashinfer_operators import measured_products
from sangam_worker.models.measured_products import MeasuredProducts

BFLOAT16 = torch.bfloat16
CPU = torch.device("cpu")


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape).to(BFLOAT16)


def assert_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    wanted = x.float() @ weight.float().t()
    wanted = wanted if bias is None else wanted + bias.float()
    torch.testing.assert_close(out, wanted.to(BFLOAT16), rtol=2**-7, atol=1e-3)


def algorithms(fake: FakeCublasLt) -> list[int]:
    return [number for number, _ in fake.ran]


# cuBLASLt


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [(16, 32, 48), (32, 64, 16)])
def test_rows_and_a_weight_as_torch_has_them_are_multiplied(
    num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool
) -> None:
    torch.manual_seed(0)
    fake = FakeCublasLt()
    library = CublasLt(fake, CPU)
    for _ in range(2):  # other memory, another bias
        x, weight = numbers(num_rows, num_inputs), numbers(num_outputs, num_inputs)
        bias = numbers(num_outputs) if has_bias else None
        for algorithm in (2, 0):
            assert_product(library.product(algorithm, x, weight, bias), x, weight, bias)
    assert fake.ran == [(each, num_rows) for each in (2, 0, 2, 0)]
    assert fake.calls.count("matmul_algo_get_heuristic") == 1, "a shape is asked for once"


def test_no_more_algorithms_are_asked_for_than_are_tried() -> None:
    shape = Shape(16, 32, 48, has_bias=False)
    assert CublasLt(FakeCublasLt(3), CPU).num_algorithms(shape) == 3
    assert CublasLt(FakeCublasLt(99), CPU).num_algorithms(shape) == cublaslt.MOST_ALGORITHMS


def test_only_those_that_are_supported_are_numbered() -> None:
    fake = FakeCublasLt(3, num_refused=1)
    library = CublasLt(fake, CPU)
    assert library.num_algorithms(Shape(16, 32, 48, has_bias=False)) == 2
    x, weight = numbers(16, 32), numbers(48, 32)
    for number in range(2):
        assert_product(library.product(number, x, weight, None), x, weight)
    assert algorithms(fake) == [1, 2]


@pytest.mark.skipif(not cublaslt_fake.is_installed(), reason=cublaslt_fake.INSTALL)
def test_numbers_and_types_are_those_of_nvidia_s_bindings() -> None:
    import nvmath
    from nvmath.bindings import cublas, cublasLt

    assert int(nvmath.CudaDataType.CUDA_R_16BF) == cublaslt._BFLOAT16 == cublaslt_fake.BFLOAT16
    assert int(nvmath.CudaDataType.CUDA_R_32F) == cublaslt._FLOAT32
    assert int(cublas.ComputeType.COMPUTE_32F) == cublaslt._COMPUTE_FLOAT32
    assert int(cublas.Operation.T) == cublaslt._TRANSPOSED
    assert cublasLt.Epilogue.BIAS == cublaslt_fake.Epilogue.BIAS
    assert int(cublasLt.ReductionScheme.COMPUTE_TYPE) == cublaslt._IN_COMPUTE_TYPE
    assert int(cublas.Status.SUCCESS) == cublaslt._SUCCESS
    for each in cublaslt_fake.MatmulDescAttribute:
        assert cublasLt.MatmulDescAttribute[each.name] == each
        fake, real = (
            library.get_matmul_desc_attribute_dtype(each) for library in (FakeCublasLt(), cublasLt)
        )
        assert fake == real
    for name in cublaslt_fake.MatmulPreferenceAttribute:
        assert cublasLt.MatmulPreferenceAttribute[name.name] == name
    assert cublasLt.matmul_heuristic_result_dtype == FakeCublasLt.matmul_heuristic_result_dtype


def test_every_binding_that_is_called_has_a_signature_to_hold_it_against() -> None:
    fake = FakeCublasLt()
    CublasLt(fake, CPU).product(0, numbers(16, 16), numbers(16, 16), numbers(16))
    assert {*fake.calls} == {
        "create",
        "matmul_desc_create",
        "get_matmul_desc_attribute_dtype",
        "matmul_desc_set_attribute",
        "matrix_layout_create",
        "matmul_preference_create",
        "matmul_preference_set_attribute",
        "matmul_preference_destroy",
        "matmul_algo_get_heuristic",
        "matmul",
    }


@pytest.mark.parametrize(
    ("missing", "events"),
    [("nvmath", []), ("nvmath.bindings.cublasLt", ["products are as cuBLAS picks them"])],
)
def test_bindings_that_cannot_be_imported_are_told_and_those_that_are_not_there_are_not(
    missing: str, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvmath", "nvmath.bindings", "nvmath.bindings.cublasLt"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        if missing.startswith(name):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.delitem(sys.modules, missing)
    monkeypatch.setattr(sys, "meta_path", [BuiltinImporter])  # finds none of them
    with capture_logs() as logs:
        assert measured_products(CPU) is None
    assert [each["event"] for each in logs] == events


# The choice


class Clock:
    """Tells how long what was issued takes, from a script."""

    def __init__(self, *seconds: float) -> None:
        self.left = [*seconds]

    def __call__(self, run: Callable[[], None]) -> float:
        run()
        return self.left.pop(0)


def test_each_shape_and_number_of_rows_has_its_own_fastest_algorithm() -> None:
    torch.manual_seed(0)
    fake = FakeCublasLt(2)
    products = MeasuredProducts(CublasLt(fake, CPU))
    weights = [numbers(48, 32), numbers(48, 32), numbers(16, 48)]
    first, second, other = map(products.linear, weights)
    x, wide = numbers(32, 32), numbers(32, 48)

    for linear, weight in ((first, weights[0]), (second, weights[1])):
        assert_product(linear(x), x, weight)
    assert fake.ran == [], "torch's, until something is measured"

    # Of each shape torch's once for nothing, torch's, two algorithms.
    clock = Clock(0, 3, 2, 1, 0, 1, 2, 3)
    assert products.choose(32, clock) == {"32x48": "1 (0.33)", "48x16": "torch"}
    assert clock.left == []
    assert algorithms(fake) == [0, 0, 1, 1, 0, 1], "all weights of a shape in turn"
    fake.ran.clear()
    assert_product(first(x), x, weights[0])
    assert fake.ran == [], "nobody wants what was chosen"
    with products.chosen():
        assert_product(first(x), x, weights[0])
        assert_product(second(x), x, weights[1])
        assert_product(other(wide), wide, weights[2])
    assert algorithms(fake) == [1, 1]

    fake.ran.clear()
    with products.chosen():
        assert_product(first(x[:16]), x[:16], weights[0])
        spread = torch.stack((x, x), 1)[:, 0]
        assert_product(first(spread), x, weights[0])
    assert fake.ran == [], "others' rows, and rows that lie apart, are torch's"
    assert products.choose(16, Clock(0, 3, 1, 2, 0, 1, 2, 3))["32x48"] == "0 (0.33)"
    with products.chosen():
        first(x), first(x[:16])
    assert algorithms(fake)[-2:] == [1, 0], "the one before is kept"
    assert products.choose(32, Clock(0, 1, 2, 3, 0, 1, 2, 3))["32x48"] == "torch"
    fake.ran.clear()
    with products.chosen():
        first(x), first(x[:16])
    assert algorithms(fake) == [0], "what was measured last holds"


def test_a_bias_is_part_of_the_product() -> None:
    torch.manual_seed(0)
    fake = FakeCublasLt(1)
    products = MeasuredProducts(CublasLt(fake, CPU))
    weight, bias, x = numbers(16, 32), numbers(16), numbers(16, 32)
    lies_otherwise = weight.t().contiguous().t()
    plain, biased = products.linear(lies_otherwise), products.linear(weight, bias)
    products.choose(16, Clock(0, 3, 1, 0, 3, 1))
    with products.chosen():
        for linear, added in ((plain, None), (biased, bias)):
            assert_product(linear(x), x, weight, added)
    assert len(fake.ran) == 2 + 2, "neither is torch's"


def test_an_algorithm_that_fails_is_left_out() -> None:
    fake = FakeCublasLt(2)
    run, calls = fake.matmul, []

    def matmul(*arguments: Any) -> None:
        run(*arguments)
        calls.append(fake.ran[-1][0])
        if calls[-1] == 0:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    fake.matmul = matmul  # type: ignore[method-assign]
    products = MeasuredProducts(CublasLt(fake, CPU))
    products.linear(numbers(16, 32))
    with capture_logs() as logs:
        assert products.choose(16, Clock(0, 3, 1)) == {"32x16": "1 (0.33)"}
    assert [each["error"] for each in logs] == ["CUBLAS_STATUS_NOT_SUPPORTED"]
    assert logs[0]["event"] == "algorithm for 16x32x16 left out"


def test_a_shape_that_cublaslt_has_no_algorithm_for_is_torch_s() -> None:
    fake = FakeCublasLt()

    def matmul_algo_get_heuristic(*arguments: Any) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    fake.matmul_algo_get_heuristic = matmul_algo_get_heuristic  # type: ignore[method-assign]
    products = MeasuredProducts(CublasLt(fake, CPU))
    weight, x = numbers(16, 32), numbers(16, 32)
    linear = products.linear(weight)
    with capture_logs() as logs:
        assert products.choose(16, Clock()) == {"32x16": "torch"}
    assert [(each["name"], each["error"]) for each in logs] == [
        ("16x32x16", "CUBLAS_STATUS_NOT_SUPPORTED")
    ]
    assert_product(linear(x), x, weight)
