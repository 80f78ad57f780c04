"""The shipped constants and what was measured on an H200: errors by operator, and held out.

Attention and small kernels are measured as differences of passes that repeat to within a few per
cent, so their errors are held against the pass; the host's times spread by 30 % on their own.
"""

from dataclasses import fields
from functools import cache

import pytest
from tests.loadtest.costs.measured import PROFILES, h200

from sangam_loadtest.costs.accuracy import OperatorErrors, errors_by_operator, held_out, in_sample
from sangam_loadtest.costs.comparisons import Predictor, all_comparisons
from sangam_loadtest.costs.fit import Fit, fit
from sangam_loadtest.costs.measurements import Measurements, read_fp8_passes
from sangam_loadtest.costs.table import read_table


@cache
def shipped() -> dict[str, OperatorErrors]:
    predictor = Predictor(read_table(), "h200")
    found = all_comparisons(predictor, h200(), has_ceilings=True)
    return {item.operator: item for item in errors_by_operator(found)}


@cache
def not_seen() -> dict[str, OperatorErrors]:
    found = held_out(h200(), read_table(), "h200")
    return {item.operator: item for item in errors_by_operator(found)}


@cache
def fitted() -> Fit:
    return fit(h200(), read_table(), "h200")


@pytest.mark.parametrize(
    ("operator", "median", "worst"),
    [
        ("pass", 0.03, 0.12),
        ("without attention", 0.03, 0.10),
        ("products", 0.03, 0.07),
        ("head", 0.05, 0.10),
        ("products (fp8)", 0.08, 0.15),
        ("pass (fp8)", 0.05, 0.12),
        ("pass (fast-dllm)", 0.05, 0.06),
        ("host", 0.12, 0.40),
    ],
)
def test_what_was_measured_is_predicted(operator: str, median: float, worst: float) -> None:
    errors = shipped()[operator]
    assert errors.median < median
    assert errors.worst < worst


@pytest.mark.parametrize(
    ("operator", "median", "of_pass"), [("attention", 0.15, 0.12), ("small kernels", 0.2, 0.07)]
)
def test_differences_of_passes_are_predicted_to_within_their_noise(
    operator: str, median: float, of_pass: float
) -> None:
    errors = shipped()[operator]
    assert errors.median < median
    assert errors.worst_of_pass < of_pass


@pytest.mark.parametrize("operator", ["pass", "without attention", "products", "head"])
def test_lines_left_out_of_the_fit_are_predicted_within_10_and_25_per_cent(operator: str) -> None:
    errors = not_seen()[operator]
    assert errors.num_lines == shipped()[operator].num_lines
    assert errors.median < 0.10
    assert errors.worst < 0.25


def test_bf16_passes_of_another_run_are_predicted() -> None:
    rows = read_fp8_passes(PROFILES / "h200-fp8.csv")
    others = Measurements(tuple(row for row in rows if row.quantization == "bf16"))
    (errors,) = errors_by_operator(in_sample(others, fitted()))
    assert errors.num_lines == 18
    assert errors.median < 0.05
    assert errors.worst < 0.12


def test_the_shipped_table_is_the_fit_to_the_profile() -> None:
    table = read_table()
    for section, entry in fitted().entries:
        shipped_entry = getattr(table, section)[entry]
        fresh = getattr(fitted().table, section)[entry]
        if isinstance(fresh, str):
            assert shipped_entry == fresh
            continue
        for item in fields(fresh):
            wanted = getattr(fresh, item.name)
            if isinstance(wanted, float):
                wanted = pytest.approx(wanted, rel=0.01, abs=1e-9)
            assert getattr(shipped_entry, item.name) == wanted, f"{section}.{entry}.{item.name}"


def test_the_measurements_tell_every_constant() -> None:
    assert fitted().warnings == ()
