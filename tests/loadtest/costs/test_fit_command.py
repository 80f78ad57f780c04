"""``sangam loadtest fit`` from CSV to a table that the cost model reads, and what it refuses."""

from pathlib import Path

import pytest
from tests.loadtest.costs.measured import (
    PROFILES,
    a_batch,
    processor_table,
    worker_passes,
    write_passes,
)
from typer.testing import CliRunner, Result

from sangam_loadtest.cli import app
from sangam_loadtest.costs.model import CostModel, cost_model


def called(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["fit", *arguments], env={"COLUMNS": "200"})


def test_a_benchmarks_csv_becomes_a_table_that_predicts_it(tmp_path: Path) -> None:
    known = processor_table()
    measured = write_passes(tmp_path / "passes.csv", worker_passes(known))
    output = tmp_path / "own" / "constants.toml"
    result = called(str(measured), "--gpu", "my-cpu", "--output", str(output))
    assert result.exit_code == 0, result.output
    assert f"constants: {output}" in result.output
    assert "held out" in result.output
    text = output.read_text(encoding="utf-8")
    assert text.startswith("# Constants of the cost model on my-cpu, fitted to passes.csv")
    assert "+- 0.0%" in text
    ours = cost_model("my-cpu", "small", constants=output)
    theirs = CostModel(known, "a-cpu", ours.shape, "sangam", attention="torch-mha")
    for batch in (a_batch(512), a_batch(0, 8, 256, 7), a_batch(100, 3, 777)):
        assert ours.seconds(batch) == pytest.approx(theirs.seconds(batch), rel=0.01)


def test_a_profile_of_kernels_is_fitted_with_its_products(tmp_path: Path) -> None:
    folder, output = PROFILES, tmp_path / "h200.toml"
    result = called(
        *(str(folder / "h200-passes.csv"), "--gpu", "h200", "--output", str(output)),
        *("--products", str(folder / "h200-gemms.csv"), "--fp8", str(folder / "h200-fp8.csv")),
        "--no-hold-out",
    )
    assert result.exit_code == 0, result.output
    assert "held out" not in result.output
    ours, shipped = (cost_model("h200", "dream-7b", constants=path) for path in (output, None))
    batch = a_batch(1024, 8)
    assert ours.seconds(batch) == pytest.approx(shipped.seconds(batch), rel=1e-3)


def test_what_the_measurements_do_not_tell_is_warned_about(tmp_path: Path) -> None:
    rows = worker_passes(processor_table(), prefills=(0,), blocks=(1,))
    rows += worker_passes(processor_table(), prefills=(64, 256, 1024), blocks=(0,))
    measured = write_passes(tmp_path / "passes.csv", rows)
    result = called(str(measured), "--gpu", "my-cpu", "--output", str(tmp_path / "own.toml"))
    assert result.exit_code == 0, result.output
    assert "warning: the measurements do not tell systems.sangam." in result.output


def test_a_file_that_cannot_be_used_ends_the_command_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "passes.csv"
    path.write_text("model,engine\nsmall,sangam-torch\n", encoding="utf-8")
    result = called(str(path), "--output", str(tmp_path / "own.toml"))
    assert result.exit_code == 1
    assert f"error: {path}, line 2: " in result.output
    assert not (tmp_path / "own.toml").exists()


def test_a_table_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    measured = write_passes(tmp_path / "passes.csv", worker_passes(processor_table()))
    result = called(str(measured), "--gpu", "my-cpu", "--output", str(tmp_path), "--no-hold-out")
    assert result.exit_code == 1
    assert "cannot be written: Is a directory" in result.output
