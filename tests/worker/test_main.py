"""What a worker says before anything else: variables that do nothing."""

import json
import os
import subprocess
import sys

import pytest
from tests.worker.harness import TOKEN


@pytest.mark.integration
def test_a_mistyped_variable_is_told_at_the_start_and_a_routers_is_not() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sangam_worker"],
        env={
            **os.environ,
            "SANGAM_INTERNAL_TOKEN": TOKEN,
            "SANGAM_MODEL": "/nowhere/at/all",
            "SANGAM_TAU_TOKEN_COLOCATED": "512",
            "SANGAM_THETA_TOKENS": "512",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    told, error = done.stderr.splitlines()
    record = json.loads(told)
    assert (record["level"], record["event"]) == ("warning", "unknown_setting")
    assert record["variable"] == "SANGAM_TAU_TOKEN_COLOCATED"
    assert record["problem"].endswith("did you mean SANGAM_TAU_TOKENS_COLOCATED?")
    assert "/nowhere/at/all" in error
