"""What is said of long work: how often, and in which form."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from rich.console import Console
from structlog.testing import capture_logs
from tests.worker.checkpoints import LLADA

from sangam_worker.models.config import read_model_config
from sangam_worker.models.random_models import random_config
from sangam_worker.progress import (
    LoggedReports,
    NoReports,
    Reports,
    ShownReports,
    reports_for,
)
from sangam_worker.weights import random_weights, read_weights

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def said() -> Iterator[list[Any]]:
    structlog.reset_defaults()
    with capture_logs() as entries:
        yield entries


def test_the_log_gets_a_line_every_few_seconds_and_one_at_the_end(said: list[Any]) -> None:
    clock = Clock()
    with LoggedReports(clock).task("weights read", 16.0, "GB") as advance:
        for _ in range(16):
            clock.now += 1.0
            advance(1.0)
    assert [each["event"] for each in said] == [
        "weights read: 5 of 16 GB",
        "weights read: 10 of 16 GB",
        "weights read: 15 of 16 GB",
        "weights read: 16 GB",
    ]
    assert [each["seconds"] for each in said] == [5, 10, 15, 16.0]


def test_short_work_is_one_line(said: list[Any]) -> None:
    with LoggedReports(Clock()).task("graphs captured", 2, "sizes") as advance:
        advance(2)
    assert [each["event"] for each in said] == ["graphs captured: 2 sizes"]


def test_work_that_failed_is_not_said_to_be_done(said: list[Any]) -> None:
    with pytest.raises(RuntimeError), LoggedReports(Clock()).task("kernels", 2, "modules"):
        raise RuntimeError
    assert said == []


def test_a_terminal_gets_a_bar() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with ShownReports(console).task("weights read", 16.0, "GB") as advance:
        advance(16.0)
    assert "weights read" in out.getvalue()
    assert "16 of 16 GB" in out.getvalue()


def test_no_terminal_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert isinstance(reports_for("console"), LoggedReports)
    assert isinstance(reports_for("json"), LoggedReports)


def test_an_engine_starts_without_rich_and_without_what_serves_it() -> None:
    """As on a machine that only runs the GPU benchmarks and tests."""
    absent = ("rich", "aiohttp", "fastapi", "prometheus_client", "redis", "uvicorn")
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\n"
        "import sangam_worker.start, sangam_worker.engine_loading"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


class Sums(NoReports):
    """Adds up what was reported."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, float]] = []
        self.done = 0.0

    def task(self, what: str, total: float, unit: str) -> Any:
        self.tasks.append((what, total))
        return _Adding(self)


class _Adding:
    def __init__(self, sums: Sums) -> None:
        self._sums = sums

    def __enter__(self) -> Any:
        return self._add

    def __exit__(self, *error: object) -> None:
        pass

    def _add(self, amount: float) -> None:
        self._sums.done += amount


def test_reading_weights_reports_every_byte() -> None:
    sums: Sums = Sums()
    reports: Reports = sums
    read_weights(Path(LLADA), read_model_config(LLADA), torch.float32, CPU, reports)
    ((what, total),) = sums.tasks
    assert what == "weights read"
    assert sums.done == pytest.approx(total, rel=0.05)  # the file has a header as well


def test_drawing_weights_reports_every_parameter() -> None:
    sums = Sums()
    config = random_config("random:dream-100m")
    random_weights(config, torch.bfloat16, CPU, reports=sums)
    assert sums.done == pytest.approx(config.num_parameters / 1e9)
