"""What Kubernetes runs inside a worker's container: probes, and the hook before it stops.

``python -m sangam_worker.probe startup|ready|live`` asks this pod's own worker; with the host
network its port is not known beforehand, so a probe reads it from the port file. ``... drain`` is
the preStop hook. Standard library only: an exec probe starts a process each time.
"""

import http.client
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKEN_HEADER = "x-sangam-token"
"""``sangam_core.wire.TOKEN_HEADER``, which would import pydantic; a test holds them together."""

_ANSWER_SECONDS = 4.0
_POLL_SECONDS = 0.25
_PATHS = {"startup": "/healthz", "live": "/healthz", "ready": "/readyz"}


class NotWell(Exception):
    """The probe's answer is no; the text says why."""


def check(kind: str, environment: Mapping[str, str]) -> str:
    """Ask the worker; what it said. ``NotWell`` when it does not answer, or says no."""
    status, answer = _call("GET", _PATHS[kind], environment)
    if status != 200:
        raise NotWell(_reason(answer))
    expected = environment.get("SANGAM_WORKER_ID")
    if expected and answer.get("worker_id") != expected:
        # The port file of a process that died, its port taken by a neighbour on the host network.
        raise NotWell(f"another worker answers at this port: {answer.get('worker_id')}")
    return str(answer.get("status", "ok"))


def drain(environment: Mapping[str, str]) -> str:
    """Have the worker take no more blocks, and wait until those here have ended.

    Returns what happened. A worker that is not there, or keeps blocks past the drain deadline, is
    left to SIGTERM: the pod must stop in any case.
    """
    deadline_seconds = float(environment.get("SANGAM_DRAIN_DEADLINE_SECONDS") or 30.0)
    deadline = time.monotonic() + deadline_seconds
    while True:
        try:
            status, answer = _call("POST", "/internal/v1/leave", environment)
        except NotWell as trouble:
            return f"not drained: {trouble}"
        if status != 200:
            return f"not drained: {_reason(answer)}"
        num_blocks = answer.get("num_blocks", 0)
        if not num_blocks:
            return "drained"
        if time.monotonic() >= deadline:
            left = "1 block is" if num_blocks == 1 else f"{num_blocks} blocks are"
            return f"{left} left after {deadline_seconds:g} s"
        time.sleep(_POLL_SECONDS)


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Run one probe; the exit status, with one line of the reason."""
    kinds = [*_PATHS, "drain"]
    if len(arguments) != 1 or arguments[0] not in kinds:
        sys.stderr.write(f"usage: python -m sangam_worker.probe {'|'.join(kinds)}\n")
        return 2
    if arguments[0] == "drain":
        sys.stdout.write(drain(environment) + "\n")
        return 0
    try:
        sys.stdout.write(check(arguments[0], environment) + "\n")
    except NotWell as trouble:
        sys.stderr.write(f"{trouble}\n")
        return 1
    return 0


def _call(method: str, path: str, environment: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    """Status and JSON body. ``NotWell`` when there is no answer."""
    host = environment.get("SANGAM_ADVERTISE_HOST") or environment.get("SANGAM_HOST")
    connection = http.client.HTTPConnection(
        host or "127.0.0.1", _port(environment), timeout=_ANSWER_SECONDS
    )
    headers = {TOKEN_HEADER: environment.get("SANGAM_INTERNAL_TOKEN", "")}
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotWell(f"no answer from the worker: {type(error).__name__}: {error}") from None
    finally:
        connection.close()
    return response.status, answer if isinstance(answer, dict) else {}


def _port(environment: Mapping[str, str]) -> int:
    name = environment.get("SANGAM_PORT_FILE")
    if not name:
        raise NotWell("SANGAM_PORT_FILE is not set: the worker's port is not known")
    try:
        return int(Path(name).read_text(encoding="ascii"))
    except FileNotFoundError:
        raise NotWell(
            "no port yet: the worker is starting (weights, kernels, graphs; see its log)"
        ) from None
    except (OSError, ValueError) as error:
        raise NotWell(f"SANGAM_PORT_FILE {name}: {error}") from None


def _reason(answer: dict[str, Any]) -> str:
    reasons = answer.get("reasons") or [answer.get("reason") or answer.get("message") or "no"]
    return "; ".join(map(str, reasons))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
