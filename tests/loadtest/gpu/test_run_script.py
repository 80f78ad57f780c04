"""``run.sh`` runs the make targets with the machine's own Python, and without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.loadtest.gpu.tiny import ON_CPU

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "loadtest" / "benchmarks" / "gpu" / "run.sh"

pytestmark = pytest.mark.integration


def run(out: Path, *targets: str, flags: list[str]) -> "subprocess.CompletedProcess[str]":
    """With no wheels, and no Sangam installed as far as the script can tell."""
    environment = os.environ | {
        "PYTHON": sys.executable,
        "FLAGS": " ".join([*ON_CPU, *flags]),
        "WHEELS": str(out / "none"),
    }
    return subprocess.run(
        [str(SCRIPT), str(out), *targets],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_each_target_has_a_folder_and_no_environment_is_made(tmp_path: Path) -> None:
    done = run(tmp_path, "bench-gpu", flags=["--sizes", "tiny", "--only", "ceilings"])
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "bench-gpu" / "results.json").read_text(encoding="utf-8"))
    assert results["parts"]["ceilings"]["status"] == "done"
    assert "-m venv" not in done.stdout


def test_a_failed_target_does_not_keep_the_next_one_from_running(tmp_path: Path) -> None:
    # Without ceilings there is no floor, without single requests no figure.
    done = run(tmp_path, "bench-gpu", "bench-gpu-serving", flags=["--only", "figure", "sampler"])
    assert done.returncode == 1
    for target, part in (("bench-gpu", "sampler llada-8b"), ("bench-gpu-serving", "figure 8")):
        results = json.loads((tmp_path / target / "results.json").read_text(encoding="utf-8"))
        assert results["parts"][part]["status"] == "failed"
