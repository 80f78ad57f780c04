"""``make bench-gpu``: ceilings, correctness, then passes, operators and comparisons beside floors.

Decides which tests run when: those of the models' own shapes before anything is timed, what needs
other kernels as they come. Writes ``results.json`` and ``table.md`` as it goes (``written`` makes
CSVs of them, anywhere). Exit status 3 when a part failed or was not run; a missed goal is a result.
"""

import argparse
from collections.abc import Sequence

from benchmarks.gpu.bench import Bench, Checks
from benchmarks.gpu.commands import (
    MODELS,
    TINY_MODELS,
    Attends,
    Found,
    add_options,
    finish,
    place_of,
    run_parts,
)
from benchmarks.gpu.correctness import REPOSITORY
from benchmarks.gpu.kernels import flashinfer_waves
from benchmarks.gpu.parts import DeviceLost, Part, say
from benchmarks.gpu.sizes import H200, TINY
from benchmarks.gpu.supervised import GO_ON, PASSES_FOLDER
from benchmarks.gpu.written import write_files, write_table

__all__ = ["main", "write_files"]

_OF_MODELS = "(8b or 7b or 128) and not start and not restarts"
"""Words in the names of tests with the models' shapes, or with heads as large, that take seconds:
what is timed is held against references before."""

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

    def parts(found: Found, attends: Attends) -> list[Part]:
        tests, no_tests = _tests(given), _no_tests(given)
        bench = Bench(place, given.models, sizes, tests, given.kernels, found, attends, no_tests)
        return bench.parts()

    try:
        run = run_parts(given, parts, {}, write_table, flashinfer_waves)
    except DeviceLost as error:
        say(str(error))
        return GO_ON
    return finish(run)


def _no_tests(given: argparse.Namespace) -> str:
    """Why the tests are left out, if they are: without a GPU they are all skipped."""
    if given.device.startswith("cuda") or given.tests != _TESTS:
        return ""
    return f"{_TESTS} needs a GPU, and this is on {given.device}; --tests names others"


def _tests(given: argparse.Namespace) -> dict[Checks, list[str]]:
    """Pytest's arguments."""
    common = _files(given.tests)
    if given.device.startswith("cuda"):
        common += ["--confcutdir=tests/gpu", "--require-gpu"]
    words = {
        Checks.OF_MODELS: _OF_MODELS,
        Checks.WITHOUT_FLASHINFER: f"not ({_FLASHINFER}) and not ({_OF_MODELS})",
        Checks.OTHERS: f"({_FLASHINFER}) and not ({_OF_MODELS})",
    }
    return {tests: [*common, "-k", chosen] for tests, chosen in words.items()}


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
