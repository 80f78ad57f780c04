"""What `make` hands on and takes away, as it would do it (`make --dry-run`)."""

import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def would_run(*arguments: str) -> str:
    command = ["make", "--dry-run", *arguments]
    ran = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    return ran.stdout


def test_a_second_fleet_gets_both_of_its_ports() -> None:
    told = would_run("up", "PORT=8100", "INTERNAL_PORT=9100")
    assert "--port 8100 " in told
    assert "--internal-port 9100" in told


def test_cleaning_keeps_the_results_of_load_tests() -> None:
    removed = would_run("clean", "VENV=.some-venv").split()
    assert {".some-venv", ".sangam/logs"} <= set(removed)
    assert ".sangam" not in removed
