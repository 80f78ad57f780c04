"""The installed FlashInfer's signatures, read in a process of its own.

It is a CUDA library: importing it beside a CPU build of torch works, with the CUTLASS DSL kept out,
but leaves traces (warnings, modules) that other tests should not meet.
"""

import functools
import importlib.util
import inspect
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

_SECONDS = 110
INSTALL = (
    "pip install --no-deps -c constraints-gpu.txt flashinfer-python apache-tvm-ffi nvidia-ml-py"
)
"""All that the import needs beside what the tests have anyway: 115 MB, no CUDA."""

_WITHOUT_CUTLASS = """
import sys
sys.modules["cutlass"] = None  # it looks for a GPU
"""
_READ = f"""{_WITHOUT_CUTLASS}
import inspect, json
import flashinfer
found = {{}}
for name in json.loads(sys.argv[1]):
    of = flashinfer
    for part in name.split("."):
        of = getattr(of, part)
    found[name] = [
        (each.name, each.kind, each.default is not each.empty, repr(each.default))
        for each in inspect.signature(of).parameters.values()
    ]
print(json.dumps(found))
"""
_RUN = f"""{_WITHOUT_CUTLASS}
import runpy
runpy.run_module(sys.argv[1], run_name="__main__")
"""


def installed_signatures(*names: str) -> dict[str, inspect.Signature]:
    """By name, ``self`` left out, defaults as their ``repr``. Skips where FlashInfer is not."""
    return {name: _signature(parameters) for name, parameters in _read(names).items()}


def run_with_flashinfer(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the tests beside the installed library. Skips without FlashInfer.

    Args:
        arguments: the module's, from ``sys.argv[2]`` on.
    """
    _skip_without()
    return _run(_RUN, module, *arguments)


def skip_without_ninja() -> None:
    """It compiles nothing by itself; FlashInfer runs it."""
    scripts = sysconfig.get_path("scripts")
    if not (shutil.which("ninja") or shutil.which("ninja", path=scripts)):
        pytest.skip("ninja is not installed; `make gpu-interfaces` does that")


@functools.cache
def _read(names: tuple[str, ...]) -> dict[str, list[tuple[str, int, bool, str]]]:
    _skip_without()
    done = _run(_READ, json.dumps(names))
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[tuple[str, int, bool, str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _skip_without() -> None:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip(f"flashinfer is not installed; no GPU is needed for: {INSTALL}")


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )


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
