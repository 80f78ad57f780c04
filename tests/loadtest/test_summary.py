"""Records survive their file, and a summary counts what it should and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from sangam_loadtest.records import RecordsError, RequestRecord, read_records, write_records
from sangam_loadtest.summary import summarise


def record(index: int = 0, latency: float | None = 1.0, **changes: Any) -> RequestRecord:
    return RequestRecord(
        index, float(index), float(index), 10, 20, latency_seconds=latency, **changes
    )


def test_records_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    records = [
        record(0, placements=[["a", "b"]], num_steps=3, is_right=False),
        record(1, None, error="timeout", error_message="no end"),
        record(2, prefill_queueing_seconds=0.25, decode_queueing_seconds=0.0),
        record(3, commit_counts=[[20, 12], [32]]),
    ]
    write_records(path, records)
    assert read_records(path) == records


def test_fields_of_later_versions_are_passed_over_and_broken_lines_are_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "r.jsonl"
    line = record().to_json()
    path.write_text(line[:-1] + ',"later": 1}\n\n')
    assert read_records(path) == [record()]
    path.write_text(line + '\n{"index": 1}\n')
    with pytest.raises(RecordsError, match=r"r.jsonl, line 2"):
        read_records(path)
    with pytest.raises(RecordsError, match="No such file"):
        read_records(tmp_path / "none.jsonl")


def test_percentiles_and_rates_are_of_the_counted_requests() -> None:
    records = [record(0, 99.0, is_warmup=True), *(record(n, float(n)) for n in range(1, 11))]
    summary = summarise(records)
    latency = summary.distributions["latency"]
    assert (latency.count, latency.mean, latency.p50, latency.max) == (10, 5.5, 5.5, 10.0)
    assert latency.p90 == pytest.approx(9.1)
    assert latency.p99 == pytest.approx(9.91)
    assert summary.num_warmup == 1
    assert summary.offered_rate == pytest.approx(1.0)
    assert summary.completed_rate == pytest.approx(10 / 19)
    assert summary.output_tokens_rate == pytest.approx(200 / 19)


def test_waiting_is_told_apart_by_what_it_was_for() -> None:
    summary = summarise(
        [
            record(
                0, queueing_seconds=0.5, prefill_queueing_seconds=0.3, decode_queueing_seconds=0.2
            ),
            record(1, queueing_seconds=0.1),  # of a server that does not tell the two apart
        ]
    )
    told = {name: (d.count, d.mean) for name, d in summary.distributions.items()}
    assert told == {
        "latency": (2, 1.0),
        "queueing": (2, pytest.approx(0.3)),
        "prefill_queueing": (1, 0.3),
        "decode_queueing": (1, 0.2),
    }


def test_failures_are_counted_by_kind_and_interrupted_requests_apart() -> None:
    summary = summarise(
        [
            record(0),
            record(1, None, error="timeout", error_message="m"),
            record(2, None, error="http_503"),
            record(3, None, error="timeout", error_message="m"),
            record(4, None, error="interrupted"),
        ]
    )
    assert summary.errors == {"timeout": 2, "http_503": 1}
    assert (summary.num_requests, summary.num_completed, summary.num_interrupted) == (4, 1, 1)
    assert summary.num_failed == 3


def test_accuracy_is_of_the_answers_that_can_be_checked() -> None:
    summary = summarise(
        [
            record(0, task="sum2", is_right=True),
            record(1, task="sum2", is_right=False),
            record(2, task="count", is_right=True),
            record(3),
        ]
    )
    assert summary.num_checked_answers == 3
    assert summary.accuracy == pytest.approx(2 / 3)
    assert summary.accuracy_of_task == {"count": 1.0, "sum2": 0.5}


def test_a_run_without_answers_has_no_numbers() -> None:
    summary = summarise([record(0, None, error="timeout")])
    assert summary.distributions == {}
    assert summary.completed_rate is None
    assert summary.accuracy is None
