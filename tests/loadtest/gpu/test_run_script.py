"""``run.sh`` runs the make targets with the machine's own Python, whatever each comes to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.loadtest.gpu.tiny import ON_CPU

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "loadtest" / "benchmarks" / "gpu" / "run.sh"


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_each_target_has_a_folder_and_a_failed_one_does_not_end_the_rest(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHON": sys.executable,
        # Without single requests there is no figure, without a GPU no test of it: at once.
        "FLAGS": " ".join([*ON_CPU, "--only", "correctness", "figure"]),
        "WHEELS": str(tmp_path / "none"),
    }
    done = subprocess.run(
        [str(SCRIPT), str(tmp_path), "bench-gpu-serving", "bench-gpu"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "-m venv" not in done.stdout
    for target, part, status in (
        ("bench-gpu-serving", "figure 8", "failed"),
        ("bench-gpu", "correctness without FlashInfer", "left out"),
    ):
        file = tmp_path / target / "results.json"
        parts = json.loads(file.read_text(encoding="utf-8"))["parts"]
        assert parts[part]["status"] == status
