"""What ran a benchmark is told; nothing that does not answer fails it or holds it up."""

import time
from pathlib import Path

import pytest

from benchmarks.gpu.machine import DeviceState, asked, describe_machine, digest

FIELDS = ("driver_version", "power.limit")


def a_program(folder: Path, text: str) -> str:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


def test_answers_have_their_fields_names(tmp_path: Path) -> None:
    program = a_program(tmp_path, "echo '580.159.04, 700.00 W'")
    assert asked(FIELDS, program) == "driver_version 580.159.04, power.limit 700.00 W"


@pytest.mark.parametrize(
    "text",
    [
        "exit 9",
        "echo 'Field x is not valid'; exit 2",
        "echo 'no devices'",
        "kill -9 $$",
    ],
)
def test_a_program_that_fails_says_nothing(tmp_path: Path, text: str) -> None:
    assert asked(FIELDS, a_program(tmp_path, text)) == ""


def test_a_program_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert asked(FIELDS, str(tmp_path / "none")) == ""


def test_a_program_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    started = time.monotonic()
    assert asked(FIELDS, a_program(tmp_path, "sleep 60"), seconds=0.1) == ""
    assert time.monotonic() - started < 30


def test_without_a_gpu_there_is_no_state() -> None:
    assert DeviceState()() == ""


def test_versions_the_processor_and_the_code_are_told() -> None:
    told = describe_machine()
    assert {"python", "torch", "numpy", "processor", "commit", "sources"} <= told.keys()
    assert all(isinstance(value, str) and value for value in told.values())


def test_the_digest_is_of_the_sources_alone(tmp_path: Path) -> None:
    for name in ("services/a.py", "loadtest/b.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("1")
    before = digest(tmp_path)
    (tmp_path / "loadtest" / "notes.txt").write_text("2")
    assert digest(tmp_path) == before
    (tmp_path / "services" / "a.py").write_text("2")
    assert digest(tmp_path) != before
