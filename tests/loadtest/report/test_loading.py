"""Runs are read whole from files, labelled by what is known, and refused by file and line."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from tests.loadtest.report.records import label, records, write_run

from sangam_loadtest.records import RecordsError, RequestRecord
from sangam_loadtest.report.loading import load_run, load_runs, passes_beside, record_files
from sangam_loadtest.report.runs import ReportError, run_of
from sangam_loadtest.run_files import RunLabel


def request(index: int = 0, latency: float | None = 1.0, **changes: object) -> RequestRecord:
    return RequestRecord(
        index, float(index), float(index), 10, 20, latency_seconds=latency, **changes
    )


def test_a_run_read_from_its_file_is_the_run_in_memory(tmp_path: Path) -> None:
    rows, told = records(num_requests=50), label()
    loaded = load_run(write_run(tmp_path / "a.jsonl", rows, told))
    made = run_of(told, rows)
    assert loaded.label == told
    assert loaded.summary["true_rate"] == told.rate
    assert loaded.records.num_answered == 50
    for name, column in made.records.columns.items():
        np.testing.assert_allclose(loaded.records.columns[name], column, atol=1e-6)


def test_requests_count_but_for_the_warm_up_and_interrupted_ones(tmp_path: Path) -> None:
    rows = [
        request(3, 4.0),
        request(0, 9.0, is_warmup=True),
        request(1, None, error="interrupted"),
        request(2, None, error="timeout"),
    ]
    numbers = load_run(write_run(tmp_path / "a.jsonl", rows)).records
    assert (numbers.num_counted, numbers.num_answered) == (2, 1)
    assert (numbers.num_warmup, numbers.num_interrupted) == (1, 1)
    assert numbers.columns["scheduled_seconds"].tolist() == [2.0, 3.0]
    assert numbers.values("latency_seconds").tolist() == [4.0]
    assert numbers.values("num_steps").tolist() == []


def test_files_longer_than_a_piece_are_read_whole_and_in_order_of_due_times(tmp_path: Path) -> None:
    rows = [request(index, index / 10) for index in range(4501)]
    numbers = load_run(write_run(tmp_path / "a.jsonl", reversed(rows))).records
    assert numbers.columns["scheduled_seconds"].tolist() == list(map(float, range(4501)))
    assert numbers.values("latency_seconds")[-1] == pytest.approx(450.0)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"index": 4, "scheduled_se', "Unterminated|Invalid control"),
        ('{"index": 4}', "scheduled_seconds or output_tokens is missing"),
        ("[1, 2]", "missing"),
        ("7", "not iterable"),
        ('{"scheduled_seconds": "soon", "output_tokens": 4}', "could not convert"),
        (", ".join(['{"scheduled_seconds": 1, "output_tokens": 2}'] * 2), "Extra data"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = write_run(tmp_path / "a.jsonl", [request(index) for index in range(2100)])
    with path.open("a") as file:
        file.write("\n" + line + "\n")
    with pytest.raises(
        RecordsError, match=rf"a\.jsonl, line 2102: not a request's record.*({why})"
    ):
        load_run(path)


def test_a_run_without_requests_that_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"a\.jsonl: no request to report on: it is empty"):
        load_run(write_run(tmp_path / "a.jsonl", []))
    path = write_run(tmp_path / "b.jsonl", [request(is_warmup=True)])
    with pytest.raises(ReportError, match="1 are of the warm-up"):
        load_run(path)
    with pytest.raises(ReportError, match="finite and not negative"):
        load_run(write_run(tmp_path / "c.jsonl", [request(0, -1.0)]))


def test_paths_are_files_or_folders_and_each_file_is_read_once(tmp_path: Path) -> None:
    first = write_run(tmp_path / "x" / "b.jsonl", [request()])
    second = write_run(tmp_path / "x" / "deep" / "a.jsonl", [request()])
    assert record_files([first, tmp_path / "x"]) == [first, second]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "failed-at-its-start.jsonl").touch()
    with pytest.raises(ReportError, match=r"empty: no \.jsonl file in this folder"):
        record_files([tmp_path / "empty"])
    with pytest.raises(ReportError, match="no run was given"):
        record_files([])
    with pytest.raises(RecordsError, match=r"none\.jsonl: No such file"):
        load_run(tmp_path / "none.jsonl")
    with pytest.raises(ReportError, match=r"named by its records, a\.jsonl"):
        load_run(tmp_path / "a.json")


def test_passes_are_found_beside_the_records(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    (tmp_path / "b.passes.csv").write_text("")
    assert passes_beside([first, second]) == [tmp_path / "b.passes.csv"]


def test_without_a_summary_the_file_names_the_configuration_and_due_times_the_rate(
    tmp_path: Path,
) -> None:
    rows = [request(index) for index in range(11)]
    path = write_run(tmp_path / "mine.jsonl", rows)
    assert load_run(path).label == RunLabel(None, "mine", rate=1.0)


def test_unlabelled_files_of_one_name_go_by_their_folders_too(tmp_path: Path) -> None:
    write_run(tmp_path / "x" / "run.jsonl", [request()])
    write_run(tmp_path / "y" / "run.jsonl", [request()])
    write_run(tmp_path / "z" / "run.jsonl", [request()], label(configuration="8C"))
    names = [run.label.configuration for run in load_runs([tmp_path])]
    assert names == ["x/run", "y/run", "8C"]


def test_a_measured_summary_without_a_label_still_tells_model_trace_and_rate(
    tmp_path: Path,
) -> None:
    path = write_run(tmp_path / "mine.jsonl", [request()])
    summary = {
        "command": "sangam loadtest run",
        "options": {"model": "/models/small", "trace": {"trace": "traces/azure.csv"}},
        "true_rate": 3.5,
    }
    path.with_suffix(".summary.json").write_text(json.dumps(summary))
    assert load_run(path).label == RunLabel("measured", "mine", "small", "azure.csv", 3.5)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"label": 3}', "label must be a JSON object"),
        ('{"label": {"rate": "6"}}', r"label\.rate must be a positive number or null, not '6'"),
        ('{"label": {"rate": true}}', r"label\.rate must be a positive number"),
        ('{"label": {"tau_tokens": -1}}', r"label\.tau_tokens must be a positive number"),
        ('{"label": {"model": 8}}', r"label\.model must be a text or null, not 8"),
        ('{"label": {"kind": "guessed"}}', r"label\.kind must be measured, simulated or null"),
    ],
)
def test_a_bad_summary_is_named_with_its_field(tmp_path: Path, text: str, why: str) -> None:
    path = write_run(tmp_path / "a.jsonl", [request()])
    path.with_suffix(".summary.json").write_text(text)
    with pytest.raises(ReportError, match=rf"a\.summary\.json.*{why}"):
        load_run(path)


def test_two_hundred_runs_of_four_thousand_records_would_load_in_a_minute(tmp_path: Path) -> None:
    """A twentieth of them, on a machine that may be busy, in a twentieth of the time."""
    paths = [write_run(tmp_path / f"{n}.jsonl", records(num_requests=4000)) for n in range(1)]
    size = paths[0].read_bytes()
    for number in range(1, 10):
        paths.append(tmp_path / f"{number}.jsonl")
        paths[-1].write_bytes(size)
    started = time.process_time()
    runs = load_runs(paths)
    seconds = time.process_time() - started
    assert sum(run.records.num_answered for run in runs) == 40_000
    assert seconds < 60 / 20
