"""A failing part costs that part, what was found is written at once, and nothing runs for ever."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.parts import Budget, DeviceLost, Part, Record, Run, parts_of, say


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Kernels:
    """Compiled once somebody has waited."""

    def __init__(self, *, is_ready: bool = True, can_be: bool = True, complaint: str = "") -> None:
        self._is_ready, self._can_be, self._complaint = is_ready, can_be, complaint

    def is_ready(self, num_waves: int) -> bool:
        return self._is_ready or not num_waves

    def wait(self, num_waves: int, seconds: float) -> None:
        self._is_ready = self._can_be

    def complaint(self, num_waves: int) -> str:
        return self._complaint if num_waves else ""


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
    needing = Part("needing", finds(0).run, num_waves=1)
    run = a_run(tmp_path)
    run.run_all([needing, finds(1), finds(2)], Kernels(is_ready=False))
    assert list(run.parts) == ["finds 1", "finds 2", "needing"]
    assert not run.complaints


def test_kernels_that_never_come_are_told(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    needing = Part("needing", finds(0).run, num_waves=1)
    run.run_all([needing, finds(1)], Kernels(is_ready=False, can_be=False))
    assert run.complaints == ["needing: not run: its kernels are not compiled"]


def test_where_kernels_failed_one_part_is_tried_and_its_failure_is_the_others_reason(
    tmp_path: Path,
) -> None:
    kernels = Kernels(complaint="failed: page")
    needing = [Part(name, fails, num_waves=1) for name in ("one", "two")]
    run = a_run(tmp_path)
    run.run_all([*needing, finds(1)], kernels)
    assert [part["status"] for part in run.parts.values()] == ["failed", "not run", "done"]
    assert run.parts["two"]["error"] == "its kernels failed: page"


def test_where_kernels_failed_that_nothing_needs_everything_is_run(tmp_path: Path) -> None:
    needing = replace(finds(0), num_waves=1)
    run = a_run(tmp_path)
    run.run_all([needing, replace(needing, name="again")], Kernels(complaint="failed: norm"))
    assert not run.complaints


def test_what_a_part_has_found_is_written_while_it_runs(tmp_path: Path) -> None:
    clock = Clock()

    def speaks(record: Record, budget: Budget) -> None:
        record["first"] = 1
        say("soon")
        seen.append(written(tmp_path)["speaks"]["found"])
        clock.now += 5
        say("later")
        seen.append(written(tmp_path)["speaks"]["found"])

    seen: list[Record] = []
    run = a_run(tmp_path, clock=clock)
    tables: list[Record] = []
    run.also_write = lambda results: tables.append(dict(results["parts"]["speaks"]["found"]))
    run.run_part(Part("speaks", speaks))
    assert seen == [{}, {"first": 1}]
    assert tables == [{}, {"first": 1}, {"first": 1}]


def test_a_file_is_there_in_whole_or_not_at_all(tmp_path: Path) -> None:
    a_run(tmp_path).run_all([finds(1)], Kernels())
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_the_device_s_state_is_noted_behind_each_part(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    run.device_state = lambda: "clocks.sm 1980 MHz"
    run.run_part(finds(1))
    assert written(tmp_path)["finds 1"]["device"] == "clocks.sm 1980 MHz"


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
