"""``make bench-gpu``: ceilings, correctness, then passes, operators and comparisons beside floors.

Decides the parts and their order: what the goals need first, what needs no compiled kernels while
those are compiled. Writes ``results.json`` (after every part), ``table.md`` and CSVs that
``sangam loadtest fit`` reads. Exit status 3 when a part failed or was not run; a missed goal is a
result.
"""

import argparse
from collections.abc import Sequence

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.commands import (
    MODELS,
    TINY_MODELS,
    Found,
    add_options,
    finish,
    place_of,
    run_parts,
)
from benchmarks.gpu.correctness import REPOSITORY
from benchmarks.gpu.parts import DeviceLost, Part, say
from benchmarks.gpu.sizes import H200, TINY
from benchmarks.gpu.supervised import GO_ON, PASSES_FOLDER
from benchmarks.gpu.written import write_files

__all__ = ["main", "write_files"]

_FLASHINFER = (
    "flashinfer or graphs or attention or start or fa2 or fa3 or replays"
    " or (fp8 and (test_engine_gpu or test_serving_gpu))"
)
"""Words in the names of tests that need FlashInfer's kernels; whole engines in FP8 do."""

_TESTS = "tests/gpu"
_LAST = "test_engine_gpu.py"
"""Most of the tests: what a kernel does wrong the others, which come first, say more clearly."""

FA_KERNELS = ["flashinfer-fa2", "flashinfer-fa3"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    given = _parser().parse_args(arguments)
    sizes = {"h200": H200, "tiny": TINY}[given.sizes]
    place = place_of(given, f"--kernels torch --sizes tiny --models {' '.join(TINY_MODELS)}")

    def parts(found: Found) -> list[Part]:
        tests, no_tests = _tests(given), _no_tests(given)
        return Bench(place, given.models, sizes, tests, given.kernels, found, no_tests).parts()

    try:
        run = run_parts(given, parts, {})
    except DeviceLost as error:
        say(str(error))
        return GO_ON
    finally:
        write_files(given.out)
    return finish(run)


def _no_tests(given: argparse.Namespace) -> str:
    """Why the tests are left out, if they are: without a GPU they are all skipped."""
    if given.device.startswith("cuda") or given.tests != _TESTS:
        return ""
    return f"{_TESTS} needs a GPU, and this is on {given.device}; --tests names others"


def _tests(given: argparse.Namespace) -> list[list[str]]:
    """Pytest's arguments: first what needs no kernel that is compiled meanwhile, then the rest."""
    common = _files(given.tests)
    if given.device.startswith("cuda"):
        common += ["--confcutdir=tests/gpu", "--require-gpu"]
    return [[*common, "-k", f"not ({_FLASHINFER})"], [*common, "-k", _FLASHINFER]]


def _files(tests: str) -> list[str]:
    """The files of a folder, in the order in which they are to run: the time may not do for all."""
    folder = REPOSITORY / tests
    if not folder.is_dir():
        return [tests]
    names = sorted(file.name for file in folder.glob("test_*.py") if file.name != _LAST)
    if (folder / _LAST).exists():
        names.append(_LAST)
    return [f"{tests}/{name}" for name in names]


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="bench-gpu", description=summary)
    add_options(parser, PASSES_FOLDER)
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), help="random:NAME or a folder, LLaDA first"
    )
    parser.add_argument("--sizes", choices=("h200", "tiny"), default="h200", help="tiny: for CPUs")
    parser.add_argument("--tests", default=_TESTS, help=f"what pytest runs ({_TESTS})")
    parser.add_argument(
        "--kernels", nargs="+", default=FA_KERNELS, help="attention backends set beside each other"
    )
    return parser
