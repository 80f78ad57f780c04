"""The installed FlashInfer's signatures, read in a process of its own.

It is a CUDA library: importing it beside a CPU build of torch works, with the CUTLASS DSL kept out,
but leaves traces (warnings, modules) that other tests should not meet.
"""

import functools
import importlib.util
import inspect
import json
import os
import subprocess
import sys

import pytest

_SECONDS = 240
INSTALL = (
    "pip install --no-deps -c constraints-gpu.txt "
    "flashinfer-python apache-tvm-ffi einops nvidia-ml-py tabulate"
)
"""All that the import needs beside the worker's own packages; 115 MB, no CUDA."""

_READ = """
import inspect, json, sys
sys.modules["cutlass"] = None  # it looks for a GPU
import flashinfer
found = {}
for name in json.loads(sys.argv[1]):
    of = flashinfer
    for part in name.split("."):
        of = getattr(of, part)
    found[name] = [
        (each.name, each.kind, each.default is not each.empty, repr(each.default))
        for each in inspect.signature(of).parameters.values()
    ]
print(json.dumps({"version": flashinfer.__version__, "signatures": found}))
"""


def installed_signatures(*names: str) -> dict[str, inspect.Signature]:
    """By name, ``self`` left out, defaults as their ``repr``. Skips where FlashInfer is not."""
    return {name: _signature(parameters) for name, parameters in _read(names).items()}


@functools.cache
def _read(names: tuple[str, ...]) -> dict[str, list[tuple[str, int, bool, str]]]:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip(f"flashinfer is not installed; no GPU is needed for: {INSTALL}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _READ, json.dumps(names)],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
        env={**os.environ, "FLASHINFER_LOGLEVEL": "0"},
    )
    if done.returncode:
        pytest.skip(f"flashinfer cannot be imported here: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, list[tuple[str, int, bool, str]]]
    found = json.loads(done.stdout.splitlines()[-1])["signatures"]
    return found


def _signature(parameters: list[tuple[str, int, bool, str]]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                list(inspect._ParameterKind)[kind],
                default=default if has_default else inspect.Parameter.empty,
            )
            for name, kind, has_default, default in parameters
            if name != "self"
        ]
    )
