"""kubectl and helm as the tests use them, and waiting for conditions."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tests.cluster.settings import NAMESPACE

T = TypeVar("T")


class CommandFailed(AssertionError):
    """A command that should have succeeded; the text is what it printed."""

    def __init__(self, command: Sequence[str], output: str) -> None:
        super().__init__(f"{' '.join(command)}\n{output}")
        self.output = output


def run(*command: str, seconds: float = 120, data: str | None = None, **env: str) -> str:
    """Run a command; its output. Raises ``CommandFailed`` with both streams."""
    done = subprocess.run(
        command,
        input=data,
        text=True,
        capture_output=True,
        timeout=seconds,
        check=False,
        env={**os.environ, **env},
    )
    if done.returncode:
        raise CommandFailed(command, done.stdout + done.stderr)
    return done.stdout


def kubectl(*arguments: str, seconds: float = 120, data: str | None = None) -> str:
    """kubectl in the tests' namespace."""
    return run("kubectl", "-n", NAMESPACE, *arguments, seconds=seconds, data=data)


def helm(*arguments: str, seconds: float = 300) -> str:
    """helm in the tests' namespace."""
    return run("helm", "-n", NAMESPACE, *arguments, seconds=seconds)


def get(kind: str, name: str = "", *arguments: str) -> Any:
    """An object, or the list of a kind, as JSON."""
    words = [word for word in ("get", kind, name, "-o", "json", *arguments) if word]
    answer = json.loads(kubectl(*words))
    return answer["items"] if answer["kind"].endswith("List") else answer


def wait_until(condition: Callable[[], T], what: str, seconds: float = 60) -> T:
    """Wait until ``condition`` is true (its value is returned); kubectl's failures are no."""
    deadline = time.monotonic() + seconds
    trouble = ""
    while True:
        try:
            met = condition()
            if met:
                return met
        except (CommandFailed, subprocess.TimeoutExpired) as error:
            trouble = f" ({error})"
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}{trouble}"
        time.sleep(0.3)


def pods(selector: str) -> list[Any]:
    """Pods by label, those that are going away left out."""
    return [p for p in get("pods", "", "-l", selector) if "deletionTimestamp" not in p["metadata"]]


def is_ready(pod: Any) -> bool:
    """Whether a pod is ready."""
    conditions = pod["status"].get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
