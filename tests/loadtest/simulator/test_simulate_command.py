"""``sangam loadtest simulate``: what it writes, that it writes it again, and what it refuses."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sangam_loadtest.cli import app
from sangam_loadtest.records import RequestRecord, read_records
from sangam_loadtest.system_options import PolicyOptions


def called(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "200"})


def simulated(output: Path, *more: str, split: str = "1P1C") -> Result:
    result = called(split, *("--rate", "4", "--requests", "8", "--output", str(output)), *more)
    assert result.exit_code == 0, result.output
    return result


def summary_of(output: Path) -> dict[str, Any]:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    text = output.with_suffix(".summary.json").read_text()
    told: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return told


def test_records_and_a_labelled_summary_are_written(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "run.jsonl"
    result = simulated(output, "--system", "paper", "--tau", "2048")
    assert "8 of 8 requests answered" in result.output
    assert "workers busy" in result.output
    records = read_records(output)
    assert [record.index for record in records] == list(range(8))
    assert all(record.latency_seconds for record in records)
    assert all(record.commit_counts == [] for record in records)
    told = summary_of(output)
    assert told["command"] == "sangam loadtest simulate"
    assert told["label"] == {
        "kind": "simulated",
        "configuration": "1P1C",
        "model": "llada-8b",
        "trace": "sharegpt",
        "rate": 4,
        "system": "paper",
        "tau_tokens": 2048,
    }
    assert told["summary"]["distributions"]["latency"]["count"] == 8
    assert told["options"]["split"] == "1P1C"
    assert told["options"]["gpu"] == "h100"
    assert told["options"]["total_pages"] > 1000


def test_the_same_options_give_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    texts = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        output = tmp_path / f"{name}.jsonl"
        simulated(output, "--seed", seed, "--keep-commits")
        texts.append(output.read_bytes())
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_kept_commits_can_be_drawn_from_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    simulated(first, "--keep-commits", "--commits-per-pass", "4")
    simulated(second, "--keep-commits", "--commits-from", str(first))
    for output in (first, second):
        blocks = [block for record in read_records(output) for block in record.commit_counts]
        # Answers end within their last block, so that a run's blocks are not all whole.
        assert sum(map(sum, blocks)) / sum(map(len, blocks)) == pytest.approx(4.0, rel=0.15)


def test_passes_are_written_by_batch(tmp_path: Path) -> None:
    output = tmp_path / "run.jsonl"
    result = simulated(output, "--passes", split="1C")
    path = output.with_suffix(".passes.csv")
    assert str(path) in result.output
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    batches = [int(row["decode_blocks"]) for row in rows]
    assert batches == sorted(set(batches))
    assert batches[0] == 1
    for row in rows:
        assert row["engine"] == "simulated-sangam"
        assert (row["model"], row["prefill_tokens"]) == ("llada-8b", "0")
        assert float(row["total_ms"]) > 1
        assert int(row["context_tokens"]) > 0
    assert float(rows[-1]["total_ms"]) > float(rows[0]["total_ms"])


def test_a_deployment_gets_the_name_that_it_was_given(tmp_path: Path) -> None:
    output = tmp_path / "run.jsonl"
    simulated(output, "--label", "ours, theta off", "--theta", "inf")
    assert summary_of(output)["label"]["configuration"] == "ours, theta off"


def test_the_papers_system_has_the_papers_mask_buffer(tmp_path: Path) -> None:
    """L changes nothing but the cost, and that much."""
    means = {}
    for name, options in (
        ("own", ("--system", "paper")),
        ("said", ("--system", "paper", "--mask-buffer", "1024")),
        ("longer", ("--system", "paper", "--mask-buffer", "2048")),
    ):
        output = tmp_path / f"{name}.jsonl"
        simulated(output, *options, split="2C")
        means[name] = summary_of(output)["summary"]["distributions"]["latency"]["mean"]
    assert means["own"] == means["said"] < means["longer"]


def test_time_stamps_of_a_trace_are_arrivals(tmp_path: Path) -> None:
    trace, output = tmp_path / "azure.csv", tmp_path / "run.jsonl"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.60,5,44\n2023-11-16 18:15:46.70,6,44\n2023-11-16 18:15:46.95,7,44\n"
    )
    result = called(
        *("2C", "--trace", str(trace), "--arrivals", "trace", "--requests", "3"),
        *("--output", str(output)),
    )
    assert result.exit_code == 0, result.output
    records = read_records(output)
    assert [r.scheduled_seconds for r in records] == pytest.approx([0, 0.1, 0.35], abs=1e-6)
    assert summary_of(output)["label"]["rate"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["8X", "--rate", "1"], "split '8X'"),
        (["8P", "--rate", "1"], "no worker could decode"),
        (["8C"], "need a rate"),
        (["8C", "--rate", "1", "--trace", "questions"], "(questions) cannot be simulated"),
        (["8C", "--rate", "1", "--pages", "10"], "a worker has 10"),
        (["8C", "--rate", "1", "--mask-buffer", "32"], "exceeds L = 32"),
        (["8C", "--rate", "1", "--mask-buffer", "33"], "L (33) must be whole blocks"),
        (["8C", "--rate", "1", "--theta", "0"], "theta must be positive"),
        (["8C", "--rate", "1", "--gpu", "abacus"], "abacus"),
        (["8C", "--rate", "1", "--system", "vllm"], "vllm"),
        (["8C", "--rate", "1", "--link", "string"], "string"),
        (["8C", "--rate", "1", "--quantization", "int1"], "int1"),
        (["8C", "--rate", "1", "--placement", "best"], "placement 'best'"),
        (["8C", "--rate", "1", "--admission", "all"], "admission 'all'"),
        (["8C", "--rate", "1", "--commits-per-pass", "40"], "[1, 16]"),
        (["8C", "--rate", "1", "--commits-from", "nowhere.jsonl"], "nowhere.jsonl"),
        (["8C", "--rate", "1", "--constants", "nowhere.toml"], "nowhere.toml"),
        (
            ["8C", "--rate", "1", "--commits-per-pass", "2", "--commits-from", "x.jsonl"],
            "exclude each other",
        ),
    ],
)
def test_what_cannot_be_simulated_is_one_line_that_says_why(
    arguments: list[str], told: str, tmp_path: Path
) -> None:
    output = tmp_path / "run.jsonl"
    result = called(*arguments, *("--requests", "5", "--output", str(output)))
    assert result.exit_code == 1, result.output
    assert told in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
    assert not output.exists()


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    output = tmp_path / "file" / "run.jsonl"
    output.parent.write_text("not a folder")
    result = called("1C", *("--rate", "1", "--requests", "1", "--output", str(output)))
    assert result.exit_code == 1
    assert str(output) in result.output.replace("\n", "")


def test_ctrl_c_ends_a_simulation_without_a_traceback(tmp_path: Path) -> None:
    """The command is known to have begun when it opens the records that commits come from."""
    output, commits = tmp_path / "run.jsonl", tmp_path / "commits.jsonl"
    os.mkfifo(commits)
    # A parent that ignores Ctrl-C (a script's background job) hands that down.
    command = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from sangam_loadtest.cli import app; app()"
    )
    options = [
        "--rate",
        "50",
        "--requests",
        "100000",
        "--output",
        output,
        "--commits-from",
        commits,
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", command, "simulate", "1C", *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        kept = RequestRecord(0, 0.0, 0.0, 10, 32, commit_counts=[[1] * 32])
        commits.write_text(kept.to_json() + "\n")
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert not output.exists()


def test_the_default_label_tells_simulations_apart_that_differ_in_policy() -> None:
    assert PolicyOptions(tau=512).named("5P3C") == "5P3C"
    named = PolicyOptions(theta=4096.0, placement="shortest_delay", batch_one=True).named("5P3C")
    assert named == "5P3C, theta 4096, batch one True, placement shortest_delay"
