"""The fit finds constants that are known, and says so where measurements cannot tell them."""

from dataclasses import replace

import pytest
from tests.loadtest.costs.measured import (
    REPOSITORY,
    a_batch,
    a_pass,
    kernel_passes,
    kernel_products,
    predicted,
    processor_table,
    worker_passes,
)

from sangam_core.errors import ConfigurationError
from sangam_loadtest.costs.accuracy import errors_by_operator, held_out, in_sample
from sangam_loadtest.costs.constants import (
    AttentionConstants,
    LaunchConstants,
    ProductConstants,
    SmallConstants,
)
from sangam_loadtest.costs.fit import fit
from sangam_loadtest.costs.measurements import Measurements
from sangam_loadtest.costs.solve import FitError, Free, solve
from sangam_loadtest.costs.table import Table, read_table


def known_kernels() -> Table:
    table = read_table()
    for section, entry, constants in (
        ("products", "bf16", ProductConstants(1.4, 1.1, 5.0)),
        ("products", "fp8", ProductConstants(1.7, 1.3, 3.0)),
        ("head", "bf16", ProductConstants(1.2, 1.3, 4.5)),
        ("launch", "bf16", LaunchConstants(3e-4, 0.3)),
        ("small", "bf16", SmallConstants(2e-5, 1.4)),
        ("attention", "fa3-mha", AttentionConstants(2e-5, 2e-6, 1.6, 2.0, 4.0)),
        ("attention", "fa2-gqa", AttentionConstants(1e-5, 1e-6, 2.0, 3.0, 4.0)),
    ):
        table = table.with_entry(section, entry, constants)
    return table


def assert_alike(found: Table, known: Table, *entries: tuple[str, str]) -> None:
    for section, entry in entries:
        ours, theirs = getattr(found, section)[entry], getattr(known, section)[entry]
        for name in type(ours).__dataclass_fields__:
            value, wanted = getattr(ours, name), getattr(theirs, name)
            if isinstance(wanted, float):
                title = f"{section}.{entry}.{name}"
                assert value == pytest.approx(wanted, rel=0.01, abs=1e-12), title


def test_a_gpus_constants_are_found_again() -> None:
    known = known_kernels()
    measured = Measurements(kernel_passes(known, "h200"), kernel_products(known, "h200"))
    found = fit(measured, read_table(), "h200")
    assert_alike(
        found.table,
        known,
        *(("products", "bf16"), ("products", "fp8"), ("head", "bf16"), ("launch", "bf16")),
        *(("small", "bf16"), ("attention", "fa3-mha"), ("attention", "fa2-gqa")),
    )
    assert found.warnings == ()
    for errors in errors_by_operator(in_sample(measured, found)):
        assert errors.worst < 0.01, errors.operator


def test_a_gpus_constants_are_found_from_whole_passes_alone_as_far_as_they_tell() -> None:
    known = known_kernels()
    measured = Measurements(kernel_passes(known, "h200"))
    found = fit(measured, known.with_entry("products", "bf16", ProductConstants(1, 1, 5)), "h200")
    errors = {item.operator: item for item in errors_by_operator(in_sample(measured, found))}
    assert errors["pass"].worst < 0.05
    assert found.table.products["bf16"].flops_factor == pytest.approx(1.1, rel=0.1)


def test_a_cpus_rates_and_overheads_are_found_again() -> None:
    known = processor_table()
    measured = Measurements(worker_passes(known))
    found = fit(measured, read_table(), "a-cpu")
    assert_alike(found.table, known, ("gpus", "a-cpu"), ("attention", "torch-mha"))
    assert found.table.systems["sangam"].pass_seconds == pytest.approx(1e-3, rel=0.01)
    assert found.table.systems["sangam"].sequence_seconds == pytest.approx(2e-4, rel=0.01)
    assert found.table.systems["paper"] == read_table().systems["paper"]
    assert found.table.backends["small"] == "torch-mha"


def test_time_by_the_row_is_told_by_models_of_several_sizes() -> None:
    known = processor_table(row_seconds=3e-6)
    found = fit(Measurements(worker_passes(known)), read_table(), "a-cpu")
    assert found.table.systems["sangam"].row_seconds == 0
    tiny = str(REPOSITORY / "tests" / "golden" / "models" / "llada-tiny-a")
    models = ("small", tiny)
    rows = tuple(row for model in models for row in worker_passes(known, model=model))
    found = fit(Measurements(rows), read_table(), "a-cpu")
    assert found.table.systems["sangam"].row_seconds == pytest.approx(3e-6, rel=0.02)
    assert found.table.gpus["a-cpu"].bf16_flops == pytest.approx(5e10, rel=0.02)


def test_lines_that_were_held_out_are_predicted_as_well() -> None:
    measured = Measurements(worker_passes(processor_table()))
    errors = {
        item.operator: item
        for item in errors_by_operator(held_out(measured, read_table(), "a-cpu"))
    }
    assert errors["pass"].num_lines == len(measured.passes)
    assert errors["pass"].worst < 0.01


def test_noise_shifts_what_is_found_no_further_than_the_spread_that_is_told() -> None:
    known = processor_table()
    noisy = tuple(
        replace(row, total=row.total * (1.02 if number % 2 else 0.98))
        for number, row in enumerate(worker_passes(known))
    )
    found = fit(Measurements(noisy), read_table(), "a-cpu")
    for name, value in (("bf16_flops", 5e10), ("bytes_per_second", 2e9)):
        spread = found.spreads[f"gpus.a-cpu.{name}"]
        assert 0 < spread < 0.1
        assert abs(getattr(found.table.gpus["a-cpu"], name) / value - 1) < 4 * spread


def test_what_passes_of_one_size_cannot_tell_is_left_alone_and_said() -> None:
    # Without passes of several sequences, a pass's time and a sequence's are one.
    rows = worker_passes(processor_table(), prefills=(0,), blocks=(1,))
    with_prefills = worker_passes(processor_table(), prefills=(64, 256, 1024), blocks=(0,))
    found = fit(Measurements(rows + with_prefills), read_table(), "a-cpu")
    told = " ".join(found.warnings)
    assert "the measurements do not tell systems.sangam." in told
    system = found.table.systems["sangam"]
    assert system.pass_seconds + system.sequence_seconds == pytest.approx(1.2e-3, rel=0.02)


def test_too_few_measurements_are_refused() -> None:
    rows = worker_passes(processor_table())[:2]
    with pytest.raises(FitError, match="4 measurements cannot determine 7 constants"):
        fit(Measurements(rows), read_table(), "a-cpu")


def test_a_constant_that_no_measurement_depends_on_is_refused() -> None:
    free = [Free("small", "fp8", "layer_seconds", 1e-5)]

    def residuals(table: Table) -> list[float]:
        return [table.small["bf16"].bytes_factor - 1.0]

    with pytest.raises(FitError, match=r"no measurement depends on small.fp8.layer_seconds"):
        solve(read_table(), free, residuals)


def test_kernels_of_a_device_without_ceilings_are_refused() -> None:
    row = predicted(read_table(), "h200", a_pass(a_batch(1024)))
    with pytest.raises(FitError, match=r"the table has no device 'a100' .*rows_masked"):
        fit(Measurements((row,)), read_table(), "a100")


def test_no_measurements_and_unknown_models_are_refused() -> None:
    with pytest.raises(FitError, match="no measurements"):
        fit(Measurements(), read_table(), "h200")
    with pytest.raises(ConfigurationError, match="llada-9b"):
        fit(Measurements((a_pass(a_batch(1024), model="llada-9b"),)), read_table(), "h200")
