"""The command prints the best with its margin, writes its files, and says what it cannot do."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

import pytest
from typer.testing import CliRunner, Result

from sangam_loadtest.cli import app
from sangam_loadtest.records import read_records

SMALL = (
    *("--quick", "--jobs", "1", "--requests", "40", "--trace", "sharegpt"),
    *("--tau", "1024", "--tau-prefill", "8192", "--theta", "8192", "--placement", "hybrid"),
)


def recommend(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("recommend", *arguments), env={"COLUMNS": "160"})


def test_the_best_is_told_with_its_margin_and_everything_is_written(tmp_path: Path) -> None:
    output = tmp_path / "found"
    result = recommend(
        *("--gpus", "2", "--rate", "2.5", "--objective", "mean<=3.5", "--objective", "p99<=9"),
        *("--gpu", "h100", "--model", "llada-8b", *SMALL, "--output", str(output)),
    )
    assert result.exit_code == 0, result.output
    assert "best: " in result.output
    assert "above the 2.5 asked for" in result.output
    assert "s to spare" in result.output
    assert "helm install sangam charts/sangam --set prefill=" in result.output
    assert "too short to see" in result.output
    told = json.loads((output / "recommendation.json").read_text())
    best = told["finalists"][0]
    assert best["holds"]
    assert best["highest_rate_held"] == pytest.approx(2.5 * (1 + best["margin"]))
    assert {f["mode"] for f in told["finalists"]} == {"colocated", "hybrid", "disaggregated"}
    assert told["asked"]["gpus"] == 2
    rows = list(csv.DictReader((output / "candidates.csv").read_text().splitlines()))
    assert {row["split"] for row in rows} == {"2C", "1P1C", "1P1D"}
    assert all(float(row["latency mean (s)"]) > 0 for row in rows)
    assert (output / "capacity.png").read_bytes().startswith(b"\x89PNG")
    assert len(read_records(output / "best.jsonl")) == 40
    label = json.loads((output / "best.summary.json").read_text())["label"]
    assert (label["configuration"], label["kind"], label["rate"]) == (
        best["split"],
        "simulated",
        2.5,
    )


def test_where_nothing_holds_it_says_what_is_nearest_and_how_many_gpus_do(tmp_path: Path) -> None:
    result = recommend(
        *("--gpus", "1", "--rate", "3.5", "--objective", "mean<=5", *SMALL),
        *("--more-gpus", "--output", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    assert "no deployment of 1 GPU holds the objectives at 3.5 requests/s" in result.output
    assert "nearest: 1C" in result.output
    assert "below the 3.5 asked for" in result.output
    assert "2 GPUs do: 2C" in result.output
    told = json.loads((tmp_path / "recommendation.json").read_text())
    assert not told["finalists"][0]["holds"]
    assert told["fewest_gpus"]["split"] == "2C"
    assert "--set prefill=0,colocated=2" in result.output


def test_loose_objectives_are_told(tmp_path: Path) -> None:
    result = recommend(
        *("--gpus", "1", "--rate", "0.5", "--objective", "mean<=6", *SMALL),
        *("--output", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    assert "best: 1C" in result.output
    assert "so loose" in result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--objective", "fast"), "must look like"),
        (("--objective", "mean<=7", "--split", "5P3C"), "has 8 workers for 2 GPUs"),
        (("--objective", "mean<=7", "--split", "2X"), "such as 8C"),
        (("--objective", "mean<=7", "--placement", "random"), "--placement random: must be one of"),
        (("--objective", "mean<=7", "--admission", "all"), "--admission all: must be one of"),
        (("--objective", "mean<=7", "--theta", "0"), "--theta must be positive"),
        (("--objective", "mean<=7", "--gpu", "abacus"), "abacus"),
        (("--objective", "mean<=7", "--trace", "missing.csv"), "missing.csv"),
        (("--objective", "mean<=7", "--mask-buffer", "100"), "L (100)"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    result = recommend(
        *("--gpus", "2", "--rate", "2", "--jobs", "1", *arguments, "--output", str(tmp_path / "o"))
    )
    assert result.exit_code == 1, result.output
    assert told in result.output
    assert not (tmp_path / "o").exists()


# Whatever runs the tests may ignore Ctrl-C, as shells do for what they put in the background.
INTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from sangam_router.local.cli import main; main()"
)


def processes_of_group(group: int) -> list[str]:
    """Names of the living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            state, _, its_group = rest.split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(name)
    return found


@contextmanager
def recommending(output: Path) -> Iterator[subprocess.Popen[str]]:
    """A search of minutes in two processes, after its first stage; killed if it hangs."""
    called = subprocess.Popen(
        [
            *(sys.executable, "-c", INTERRUPTIBLE),
            *("loadtest", "recommend", "--gpus", "2", "--rate", "2.5", "--objective", "mean<=7"),
            *("--quick", "--jobs", "2", "--requests", "2000", "--tau", "1024"),
            *("--tau-prefill", "8192", "--theta", "8192", "--placement", "hybrid"),
            *("--output", str(output)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "160", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    guard = Timer(200, called.kill)
    guard.start()
    with called:
        assert called.stdout is not None
        assert any("best so far" in line for line in called.stdout)
        yield called
        guard.cancel()


@pytest.mark.integration
def test_ctrl_c_tells_the_best_so_far_and_ends_every_process(tmp_path: Path) -> None:
    with recommending(tmp_path) as called:
        called.send_signal(signal.SIGINT)
        assert called.stdout is not None
        told = called.stdout.read()
        assert called.wait() == 130
    assert "interrupted; best so far (after runs of" in told
    assert (tmp_path / "candidates.csv").exists()
    assert not processes_of_group(called.pid)


@pytest.mark.integration
def test_no_process_outlives_a_search_that_was_killed(tmp_path: Path) -> None:
    with recommending(tmp_path) as called:
        assert len(processes_of_group(called.pid)) >= 3
        called.kill()
        called.wait()
        deadline = time.monotonic() + 60
        while processes_of_group(called.pid):
            assert time.monotonic() < deadline
            time.sleep(0.1)
