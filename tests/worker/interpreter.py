"""Triton's interpreter in a process of its own: the kernels' code on a CPU, through numpy.

Triton looks for ``TRITON_INTERPRET`` when it is imported, for good; another process leaves this
one free to compile. Run as a module it is that process: a function's name, then pickled arguments
in, pickled results out.
"""

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest

from sangam_worker.sampling.greedy import GreedyKernel


def _missing() -> str:
    """Why there is no interpreter here, or nothing."""
    if find_spec("triton") is None:
        return "Triton is not installed; extra dev has it on Linux"
    installed = version("triton")
    if tuple(map(int, installed.split(".")[:2])) < (3, 7):
        return f"Triton is {installed}, whose interpreter fails with numpy 2.4; it needs 3.7"
    return ""


needs_interpreter = pytest.mark.skipif(bool(_missing()), reason=_missing())


@contextmanager
def interpreted(function: str) -> Iterator[Callable[..., Any]]:
    """A function, ``module:name``, called where Triton interprets. Arguments are copied there."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.worker.interpreter", function],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    to, back = process.stdin, process.stdout

    def call(*arguments: Any) -> Any:
        pickle.dump(arguments, to)
        to.flush()
        return pickle.load(back)

    with process:
        try:
            yield call
        finally:
            process.kill()


@contextmanager
def interpreted_kernel() -> Iterator[GreedyKernel]:
    """The greedy kernel, interpreted."""
    with interpreted("sangam_worker.sampling.greedy_kernel:summarise") as kernel:
        yield kernel


def _serve(function: str) -> None:
    module, name = function.split(":")
    called = getattr(importlib.import_module(module), name)
    while True:
        try:
            arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(called(*arguments), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
