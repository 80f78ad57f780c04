"""The commands do from the command line what their modules do, and refuse what makes no sense."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.loadtest.stub import serving, stream_of
from typer.testing import CliRunner, Result

from sangam_loadtest.cli import app
from sangam_loadtest.records import read_records


async def answering(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await stream_of(request, body, "some", " words")


def called(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_run_writes_records_and_a_summary(tmp_path: Path) -> None:
    output = tmp_path / "run.jsonl"
    with serving(answering) as served:
        result = called(
            *("run", "--url", served.url + "/v1/", "--trace", "sharegpt", "--rate", "100"),
            *("--requests", "8", "--arrivals", "constant", "--output", str(output)),
            *("--api-key", "very-secret", "--body", '{"cache": "prefix"}', "--label", "2C"),
        )
    assert result.exit_code == 0, result.output
    assert "8 of 8 requests answered" in result.output
    assert len(read_records(output)) == 8
    assert served.bodies[0]["cache"] == "prefix"
    text = output.with_suffix(".summary.json").read_text()
    told = json.loads(text)
    assert told["summary"]["distributions"]["latency"]["count"] == 8
    assert told["options"]["trace"]["trace"] == "sharegpt"
    assert told["options"]["model"] == "stub-model"
    assert told["true_rate"] == 100
    assert told["label"] == {
        "kind": "measured",
        "configuration": "2C",
        "model": "stub-model",
        "trace": "sharegpt",
        "rate": 100,
        "system": "sangam",
        "tau_tokens": None,
    }
    assert "very-secret" not in text + result.output


def test_run_replays_the_time_stamps_of_a_csv(tmp_path: Path) -> None:
    trace, output = tmp_path / "azure.csv", tmp_path / "run.jsonl"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.60,5,44\n2023-11-16 18:15:46.70,6,44\n2023-11-16 18:15:46.95,7,44\n"
    )
    with serving(answering) as served:
        result = called(
            *("run", "--url", served.url, "--trace", str(trace), "--arrivals", "trace"),
            *("--requests", "3", "--output", str(output)),
        )
    assert result.exit_code == 0, result.output
    label = json.loads(output.with_suffix(".summary.json").read_text())["label"]
    assert (label["trace"], label["rate"], label["configuration"]) == ("azure", None, None)
    records = sorted(read_records(output), key=lambda record: record.index)
    assert [r.scheduled_seconds for r in records] == pytest.approx([0, 0.1, 0.35], abs=1e-4)
    assert [len(body["prompt"]) for body in served.bodies] == [5, 6, 7]


def run_of_three(url: str, output: Path, *more: str) -> Result:
    return called(
        *("run", "--url", url, "--rate", "50", "--requests", "3"),
        *("--trace", "sharegpt", "--output", str(output), *more),
    )


def test_a_model_that_the_server_has_not_fails_at_once_and_tells_those_it_has(
    tmp_path: Path,
) -> None:
    output = tmp_path / "run.jsonl"
    with serving(answering) as served:
        result = run_of_three(served.url, output, "--model", "nope")
        assert not served.bodies
    assert result.exit_code == 1
    told = result.output.replace("\n", " ")
    assert f"--model nope: {served.url} does not serve it; it serves stub-model, stub-model" in told
    assert not output.exists()


def test_any_model_of_the_server_may_be_named(tmp_path: Path) -> None:
    with serving(answering) as served:
        result = run_of_three(served.url, tmp_path / "run.jsonl", "--model", "stub-model-2")
    assert result.exit_code == 0, result.output
    assert {body["model"] for body in served.bodies} == {"stub-model-2"}


def test_a_server_without_a_list_of_models_is_asked_for_the_one_named(tmp_path: Path) -> None:
    with serving(answering, lists_models=False) as served:
        unnamed = run_of_three(served.url, tmp_path / "unnamed.jsonl")
        named = run_of_three(served.url, tmp_path / "named.jsonl", "--model", "mine")
    assert unnamed.exit_code == 1
    assert "HTTP 404; name the model with --model" in unnamed.output.replace("\n", " ")
    assert named.exit_code == 0, named.output
    assert {body["model"] for body in served.bodies} == {"mine"}


@pytest.mark.parametrize("command", ["run", "simulate"])
def test_records_that_cannot_be_written_are_complained_about_with_their_path(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "records.jsonl"
    with serving(answering) as served:
        if command == "run":
            result = run_of_three(served.url, output)
        else:
            result = called(
                "simulate", "1C", "--rate", "1", "--requests", "1", "--output", str(output)
            )
        assert not served.bodies
    assert result.exit_code == 1
    assert "/file/records.jsonl: File exists" in result.output.replace("\n", "")


@pytest.mark.parametrize("command", ["run", "simulate"])
def test_the_folder_of_records_is_made(tmp_path: Path, command: str) -> None:
    output = tmp_path / "new" / "folder" / "records.jsonl"
    with serving(answering) as served:
        if command == "run":
            result = run_of_three(served.url, output)
        else:
            result = called(
                "simulate", "1C", "--rate", "1", "--requests", "3", "--output", str(output)
            )
    assert result.exit_code == 0, result.output
    assert len(read_records(output)) == 3


def test_run_without_an_answer_fails(tmp_path: Path) -> None:
    async def failing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no worker"}}, status=503)

    output = tmp_path / "run.jsonl"
    with serving(failing) as served:
        result = called(
            *("run", "--url", served.url, "--rate", "50", "--requests", "3"),
            *("--trace", "sharegpt", "--output", str(output)),
        )
    assert result.exit_code == 1
    assert "3 x http_503 (no worker)" in result.output
    assert output.with_suffix(".summary.json").exists()


def test_run_with_most_requests_unanswered_fails(tmp_path: Path) -> None:
    num_asked = 0

    async def rarely(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            return web.json_response({"error": {"message": "no worker"}}, status=503)
        return await stream_of(request, body, "some")

    output = tmp_path / "run.jsonl"
    with serving(rarely) as served:
        result = run_of_three(served.url, output)
    assert result.exit_code == 1
    told = result.output.replace("\n", " ")
    assert "fewer than half of the requests were answered: 1 of 3" in told
    assert output.with_suffix(".summary.json").exists()


def test_a_report_of_nothing_says_that_it_is_not_there(tmp_path: Path) -> None:
    result = called("report", str(tmp_path / "nope"))
    assert result.exit_code == 1
    assert "/nope: there is no such file or folder" in result.output.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rate", "1", "--url", "localhost:8000"], "must begin with http://"),
        ([], "need a rate"),
        (["--rate", "1", "--requests", "5", "--duration", "5"], "not both"),
        (["--rate", "1", "--trace", "wiki"], "sharegpt, arxiv, questions"),
        (["--rate", "1", "--trace", "sharegpt", "--max-total", "5"], "raise --max-total 5 to "),
        (["--rate", "1", "--sessions"], "--sessions is for synthetic traces"),
        (["--rate", "1", "--repeat"], "are for files"),
        (["--rate", "1", "--columns", "a,b"], "--columns is for .csv files"),
        (["--rate", "1", "--trace", "x.csv", "--columns", "a"], "two or three names"),
        (["--rate", "1", "--body", "{"], "not JSON"),
        (["--rate", "1", "--body", '{"stream": false}'], "stream is the load test's own"),
        (["--arrivals", "trace", "--trace", "sharegpt"], "--requests"),
    ],
)
def test_bad_options_are_one_line_that_says_what_to_do(arguments: list[str], told: str) -> None:
    result = called("run", *arguments)
    assert result.exit_code == 1, result.output
    assert told in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def capacity(url: str, folder: Path, *more: str) -> Result:
    return called(*capacity_words(url, folder, *more))


def capacity_words(url: str, folder: Path, *more: str) -> tuple[str, ...]:
    return (
        *("capacity", "--url", url, "--trace", "sharegpt", "--objective", "mean<=5"),
        *("--requests", "4", "--warmup", "0", "--settle", "0", "--start-rate", "32"),
        *("--max-rate", "64", "--state", str(folder / "state.json")),
        *("--output", str(folder / "capacity.json"), *more),
    )


def test_capacity_probes_a_server_and_a_second_call_needs_no_probe(tmp_path: Path) -> None:
    with serving(answering) as served:
        result = capacity(served.url, tmp_path)
        assert result.exit_code == 0, result.output
        assert "64 requests/s, the highest rate probed, hold" in result.output
        assert len(served.bodies) == 8
        again = capacity(served.url, tmp_path)
        assert again.exit_code == 0, again.output
        assert len(served.bodies) == 8
        other = capacity(served.url, tmp_path, "--seed", "5")
    found = json.loads((tmp_path / "capacity.json").read_text())
    assert (found["highest_held"], found["lowest_violated"]) == (64, None)
    assert [probe["rate"] for probe in found["probes"]] == [32, 64]
    assert other.exit_code == 1
    assert "seed: 0 there, 5 here" in other.output


# Whatever runs the tests may ignore Ctrl-C, as shells do for what they put in the background.
INTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from sangam_router.local.cli import main; main()"
)


@pytest.mark.integration
@pytest.mark.parametrize("num_answered_at_once", [0, 4])
def test_capacity_interrupted_says_what_goes_on_and_the_same_command_does(
    tmp_path: Path, num_answered_at_once: int
) -> None:
    """The stub is silent in the first or second probe, until the search was interrupted."""
    is_patient = True

    async def silent(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        is_silent = is_patient and len(served.bodies) > num_answered_at_once
        return await stream_of(request, body, "x", gap_seconds=30.0 if is_silent else 0.0)

    with serving(silent) as served:
        words = capacity_words(served.url, tmp_path)
        command = [sys.executable, "-c", INTERRUPTIBLE, "loadtest", *words]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as searching:
            deadline = time.monotonic() + 60
            while len(served.bodies) <= num_answered_at_once and time.monotonic() < deadline:
                time.sleep(0.02)
            os.kill(searching.pid, signal.SIGINT)
            told = searching.communicate(timeout=60)[1]
            assert searching.returncode == 130
        num_asked = len(served.bodies)
        is_patient = False
        assert capacity(served.url, tmp_path).exit_code == 0
    goes_on = f"the same command goes on from {tmp_path / 'state.json'}"
    what = goes_on if num_answered_at_once else "no probe was complete yet"
    assert told == f"interrupted; {what}\n"
    assert len(served.bodies) - num_asked == 8 - num_answered_at_once


@pytest.mark.integration
def test_capacity_can_be_interrupted_between_two_probes(tmp_path: Path) -> None:
    with serving(answering) as served:
        words = capacity_words(served.url, tmp_path, "--settle", "120")
        command = [sys.executable, "-c", INTERRUPTIBLE, "loadtest", *words]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as searching:
            deadline = time.monotonic() + 60
            while not (tmp_path / "state.json").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            os.kill(searching.pid, signal.SIGINT)
            told = searching.communicate(timeout=60)[1]
    assert searching.returncode == 130
    assert told == f"interrupted; the same command goes on from {tmp_path / 'state.json'}\n"


def test_capacity_counts_time_outs_as_violations(tmp_path: Path) -> None:
    """The stub answers the first probe and falls silent in the second one."""
    num_answered = 0

    async def tired(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal num_answered
        num_answered += 1
        return await stream_of(request, body, "x", gap_seconds=0 if num_answered <= 4 else 30.0)

    with serving(tired) as served:
        result = capacity(served.url, tmp_path, "--timeout", "0.5", "--tolerance", "0.5")
    assert result.exit_code == 0, result.output
    assert "violated" in result.output
    probes = json.loads((tmp_path / "capacity.json").read_text())["probes"]
    assert probes[0]["violations"] == []
    assert probes[1]["violations"][0] == "4 of 4 failed (4 timeout)"


@pytest.mark.parametrize(("status", "num_probes"), [(400, 1), (403, 1), (408, 5), (429, 5)])
def test_capacity_stops_at_errors_that_no_rate_mends(
    tmp_path: Path, status: int, num_probes: int
) -> None:
    num_asked = 0

    async def refusing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        message = "too long" if num_asked == 1 else "too long as well"
        return web.json_response({"error": {"message": message}}, status=status)

    with serving(refusing) as served:
        result = capacity(served.url, tmp_path)
    told = result.output.replace("\n", " ")
    assert f"failed: 4 x http_{status} (too long)" in told
    assert len(served.bodies) == 4 * num_probes
    is_refused = "the server refuses the requests, which no rate mends: 4 x http_4" in told
    assert is_refused == (num_probes == 1)
    assert result.exit_code == (1 if is_refused else 0)
