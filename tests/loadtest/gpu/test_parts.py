"""A failing part costs that part, what was found is written at once, and nothing runs for ever."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.kernels import Compilation, flashinfer_compilation
from benchmarks.gpu.parts import Budget, DeviceLost, Part, Record, Run, parts_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Kernels:
    """Compiled once somebody has waited."""

    def __init__(self, *, is_ready: bool = True, can_be: bool = True) -> None:
        self.is_ready, self._can_be = is_ready, can_be

    def wait(self, seconds: float) -> None:
        self.is_ready = self._can_be


def a_run(tmp_path: Path, seconds: float = 100.0, clock: Clock | None = None) -> Run:
    return Run(Budget(seconds, clock or Clock()), tmp_path / "results.json", {"machine": {}})


def written(tmp_path: Path) -> dict[str, Record]:
    parts: dict[str, Record] = json.loads((tmp_path / "results.json").read_text())["parts"]
    return parts


def finds(value: int) -> Part:
    def run(record: Record, budget: Budget) -> None:
        record["value"] = value

    return Part(f"finds {value}", run)


def test_a_part_that_is_not_for_this_machine_is_left_out_without_a_complaint(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path)
    run.run_all([replace(finds(1), left_out="it needs a GPU")], Kernels())
    part = written(tmp_path)["finds 1"]
    assert part == {"status": "left out", "found": {}, "error": "it needs a GPU"}
    assert run.complaints == []


def test_a_failing_part_keeps_what_it_had_and_the_others_run(tmp_path: Path) -> None:
    def fails(record: Record, budget: Budget) -> None:
        record["first"] = 1
        raise RuntimeError("CUDA error: something")

    run = a_run(tmp_path)
    run.run_all([finds(1), Part("fails", fails), finds(2)], Kernels())
    parts = written(tmp_path)
    assert [part["status"] for part in parts.values()] == ["done", "failed", "done"]
    assert parts["fails"]["found"] == {"first": 1}
    assert "RuntimeError: CUDA error: something" in parts["fails"]["error"]
    assert run.complaints == ["fails: failed: RuntimeError: CUDA error: something"]


def test_while_a_part_runs_the_file_says_so(tmp_path: Path) -> None:
    def looks(record: Record, budget: Budget) -> None:
        record["seen"] = written(tmp_path)["looks"]["status"]

    a_run(tmp_path).run_all([Part("looks", looks)], Kernels())
    assert written(tmp_path)["looks"]["found"] == {"seen": "running"}


def test_a_part_gets_no_more_than_is_left_and_is_not_begun_with_too_little(tmp_path: Path) -> None:
    clock = Clock()
    seen: list[float] = []

    def takes_sixty(record: Record, budget: Budget) -> None:
        seen.append(budget.left_seconds)
        clock.now += 60

    part = Part("long", takes_sixty, least_seconds=30, most_seconds=70)
    run = a_run(tmp_path, 110.0, clock)
    run.run_all([part, Part("again", takes_sixty, most_seconds=70), part], Kernels())
    assert seen == [70, 50]
    assert run.complaints == ["long: not run: no time was left"]


def test_what_was_left_out_is_a_complaint(tmp_path: Path) -> None:
    def stops(record: Record, budget: Budget) -> None:
        record["cut_short"] = ["64 x 2048"]

    run = a_run(tmp_path)
    run.run_all([Part("stops", stops)], Kernels())
    assert run.complaints == ["stops: cut short: time was over before 64 x 2048"]


def test_parts_without_kernels_go_first_while_kernels_are_compiled(tmp_path: Path) -> None:
    needing = Part("needing", finds(0).run, needs_kernels=True)
    run = a_run(tmp_path)
    run.run_all([needing, finds(1), finds(2)], Kernels(is_ready=False))
    assert list(run.parts) == ["finds 1", "finds 2", "needing"]
    assert not run.complaints


def test_kernels_that_never_come_are_told(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    needing = Part("needing", finds(0).run, needs_kernels=True)
    run.run_all([needing, finds(1)], Kernels(is_ready=False, can_be=False))
    assert run.complaints == ["needing: not run: its kernels are not compiled"]


def test_each_kernel_is_compiled_in_a_process_and_a_failure_has_its_last_lines() -> None:
    compilation = Compilation(
        {
            "good": [sys.executable, "-c", "pass"],
            "bad": [sys.executable, "-c", "print('nvcc: no such file'); raise SystemExit(3)"],
        }
    )
    compilation.wait(30)
    assert compilation.is_ready
    assert set(compilation.seconds) == {"good", "bad"}
    assert compilation.errors == {"bad": "nvcc: no such file"}


def test_waiting_for_kernels_has_an_end_and_they_can_be_stopped() -> None:
    compilation = Compilation({"slow": [sys.executable, "-c", "import time; time.sleep(60)"]})
    started = time.monotonic()
    compilation.wait(0.01)
    assert not compilation.is_ready
    compilation.stop()
    assert compilation.is_ready
    assert time.monotonic() - started < 30


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        a_run(tmp_path / "nowhere")


def fails(record: Record, budget: Budget) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_lost_device_ends_the_process_and_the_next_one_goes_on_behind(tmp_path: Path) -> None:
    parts = [finds(1), Part("fails", fails), finds(2)]
    run = a_run(tmp_path)
    run.is_well = lambda: False
    with pytest.raises(DeviceLost, match="after fails"):
        run.run_all(parts, Kernels())
    found = parts_of(tmp_path / "results.json")
    assert list(found) == ["finds 1", "fails"]
    again = Run(Budget(100.0), tmp_path / "results.json", {}, found)
    again.run_all(parts, Kernels())
    assert list(again.parts) == ["finds 1", "fails", "finds 2"]
    assert [line.partition(":")[0] for line in again.complaints] == ["fails"]


def test_the_part_in_which_a_process_ended_has_failed(tmp_path: Path) -> None:
    def looks(record: Record, budget: Budget) -> None:
        seen.update(parts_of(tmp_path / "results.json"))

    seen: dict[str, Record] = {}
    a_run(tmp_path).run_all([Part("looks", looks)], Kernels())
    assert seen["looks"]["status"] == "failed"
    assert "its process ended in it" in seen["looks"]["error"]


def test_a_machine_without_flashinfer_measures_what_does_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise ImportError('no CUDA here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    compilation = flashinfer_compilation()
    assert compilation.is_ready
    assert "no CUDA here" in compilation.errors["all"]
