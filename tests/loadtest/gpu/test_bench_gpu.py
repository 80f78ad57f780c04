"""``make bench-gpu`` from end to end on a CPU: every part runs, every file comes out."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.loadtest.gpu.tiny import DREAM, LLADA, ON_CPU

from benchmarks.gpu.bench import Checks
from benchmarks.gpu.command import main
from benchmarks.gpu.serving.command import main as serving_main
from benchmarks.gpu.supervised import (
    BAD_OPTIONS,
    HAS_COMPLAINTS,
    PASSES_FOLDER,
    SERVING_FOLDER,
)
from benchmarks.gpu.written import write_csvs
from sangam_loadtest.costs.measurements import read_fp8_passes, read_passes, read_products

REPOSITORY = Path(__file__).parents[3]
SOME_TESTS = "tests/loadtest/gpu/tiny_checks.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench")
    models = ["--models", LLADA, DREAM, "--kernels", "torch", "--tests", SOME_TESTS]
    assert main([*ON_CPU, "--sizes", "tiny", "--out", str(out), *models]) == 0
    assert {file.name for file in out.iterdir()} == {"results.json", "table.md"}
    write_csvs(out)
    return out


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return read


@pytest.mark.timeout(300)
def test_every_part_is_done(results: dict[str, Any]) -> None:
    statuses = {name: part["status"] for name, part in results["parts"].items()}
    assert set(statuses.values()) == {"done"}
    assert {name.partition(" ")[0] for name in statuses} == {
        "ceilings", "sampler", "products", "correctness", "decodes", "prefills", "cpu", "batch",
        "transport", "fp8", "attention", "breakdown",
    }  # fmt: skip
    for tests in Checks:
        assert results["parts"][f"correctness {tests}"]["found"]["passed"] == 1
    assert results["used_seconds"] > 0


def test_times_are_positive_and_beside_a_floor(results: dict[str, Any]) -> None:
    lines = [
        line
        for name, part in results["parts"].items()
        if name.startswith(("decodes", "prefills"))
        for line in part["found"]["lines"]
    ]
    assert len(lines) == 2 * (2 + 3)
    for line in lines:
        assert line["total_ms"] > 0
        assert line["wall_ms"] >= line["host_ms"] > 0
        assert line["floor_ms"] > 0
    assert {line["launch"] for line in lines} == {"graph", "eager"}
    with_prefill = [line for line in lines if line["prefill_tokens"]]
    assert all(line["without_attention_ms"] > 0 for line in with_prefill)


def test_a_period_of_the_loop_is_longer_than_the_engines_part_of_it(
    results: dict[str, Any],
) -> None:
    found = results["parts"]["cpu gap llada-tiny-a"]["found"]
    assert found["period_ms"] > found["device_ms"] > 0
    assert 0 < found["gap_percent"] < 100


def test_a_breakdown_names_the_operators(results: dict[str, Any]) -> None:
    for each in results["parts"]["breakdown dream-tiny-a"]["found"]["passes"]:
        assert {"products", "attention"} <= each["by_class_ms"].keys()
        assert each["longest_ms"]
        assert each["floor_ms"].keys() == {"products", "attention", "small kernels", "sampler"}


def test_the_cost_model_reads_what_was_measured(folder: Path) -> None:
    passes = read_passes(folder / "passes.csv")
    assert {(row.launch, row.batch.num_prefills) for row in passes} == {
        ("graph", 0), ("eager", 1), ("eager", 0),
    }  # fmt: skip
    assert not any(row.is_worker for row in passes)
    assert {row.backend for row in passes} == {"torch"}
    assert len(read_fp8_passes(folder / "fp8.csv")) == 2 * 2 * 2
    assert {row.rows for row in read_products(folder / "products.csv")} == {16}


def test_attention_backends_are_told_by_batch(folder: Path) -> None:
    with (folder / "attention.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {(row["num_heads"], row["num_kv_heads"]) for row in rows} == {("4", "4"), ("4", "2")}
    assert {row["fastest"] for row in rows} == {"torch"}
    assert all(float(row["torch_ms"]) > 0 for row in rows)


def test_the_table_has_the_goals_and_each_part(folder: Path, results: dict[str, Any]) -> None:
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert "| llada-8b decode pass, graph, context 1024, 8 blocks | not measured |" in table
    assert all(f"## {name}\n" in table for name in results["parts"])


def test_a_part_by_name_runs_alone(tmp_path: Path) -> None:
    options = [*ON_CPU, "--sizes", "tiny", "--out", str(tmp_path), "--only", "ceilings"]
    assert main(options) == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert list(results["parts"]) == ["ceilings"]


def test_on_a_cpu_the_tests_for_gpus_are_left_out_and_the_table_says_why(tmp_path: Path) -> None:
    options = [*ON_CPU, "--sizes", "tiny", "--out", str(tmp_path), "--models", LLADA]
    assert main([*options, "--only", "correctness"]) == 0
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert table.count("**left out**: tests/gpu needs a GPU, and this is on cpu") == 3


@pytest.mark.parametrize(
    ("command", "folder"), [(main, PASSES_FOLDER), (serving_main, SERVING_FOLDER)]
)
def test_help_tells_where_results_go(
    command: Callable[[list[str]], int], folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(["--help"])
    assert f"folder for the results ({folder})" in " ".join(capsys.readouterr().out.split())


def test_a_failed_part_shows_in_the_exit_status_and_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*ON_CPU, "--sizes", "tiny", "--out", str(tmp_path), "--models", LLADA]
    assert main([*options, "--tests", "no/such/file", "--only", "all else"]) == HAS_COMPLAINTS
    told = "correctness of all else: failed: TestsFailed"
    assert f"NOT DONE  {told}" in capsys.readouterr().err
    assert "**failed**: TestsFailed" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_without_ceilings_floors_are_an_h200s_and_the_table_says_so(tmp_path: Path) -> None:
    options = [*ON_CPU, "--sizes", "tiny", "--out", str(tmp_path), "--models", LLADA]
    assert main([*options, "--only", "sampler"]) == 0
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "Assumed, an H200's by the cost model's table: copy_bytes_per_second" in table
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    (line,) = results["parts"]["sampler llada-tiny-a"]["found"]["lines"]
    assert line["floor_ms"] == pytest.approx(1000 * 4 * 256 * 2 / 4.27e12, rel=0.5)


def test_without_a_gpu_the_command_says_how_to_try_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (main, serving_main):
        with pytest.raises(SystemExit) as ended:
            command(["--out", str(tmp_path)])
        assert ended.value.code == BAD_OPTIONS
        options = capsys.readouterr().err.partition("--device cpu")[2].split()
        models = [option for option in options if option.startswith("tests/")]
        assert all((REPOSITORY / model / "config.json").exists() for model in models)
        with pytest.raises(SystemExit) as parsed:
            command(["--device", "cpu", *options, "--help"])
        assert parsed.value.code == 0
        capsys.readouterr()
        assert models


def test_a_resumed_run_goes_on_behind_what_was_found(tmp_path: Path) -> None:
    options = [*ON_CPU, "--sizes", "tiny", "--out", str(tmp_path), "--models", LLADA]
    assert main([*options, "--only", "ceilings"]) == 0
    first = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["parts"]
    assert main([*options, "--only", "ceilings", "sampler", "--resume"]) == 0
    parts = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["parts"]
    assert parts["ceilings"] == first["ceilings"]
    assert parts["sampler llada-tiny-a"]["status"] == "done"
