"""``make bench-gpu-serving``: one GPU serving a chat trace at rising rates, against batch 1.

In this process, without HTTP, on the worker's own loop, scheduler and engine. Lengths are the
trace's, prompts made up, commits forced (random weights have none worth the name). Writes
``results.json`` and ``table.md`` as it goes, and ``figure-8.png`` at the end.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from benchmarks.gpu.engines import name_of
from benchmarks.gpu.kernels import models_waves
from benchmarks.gpu.parts import DeviceLost, Part, say, write_text
from benchmarks.gpu.serving.figure import draw
from benchmarks.gpu.serving.figure_8 import Figure8, Options
from benchmarks.gpu.serving.rates import Window
from benchmarks.gpu.serving.table import table
from benchmarks.gpu.supervised import GO_ON, SERVING_FOLDER
from sangam_loadtest.records import read_records
from sangam_loadtest.simulator.commits import (
    DEFAULT_COMMITS,
    CommitCounts,
    GeometricCommits,
    RecordedCommits,
)
from sangam_loadtest.traces.synthetic import SYNTHETIC_TRACES

_SOME_COMMITS = 1.7
_TINY = (
    f"--model {TINY_MODELS[0]} --mask-buffer 0 --max-prompt 64 --max-output 64 --pages 200 "
    "--single 5 --run 15 --max-runs 3"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    options = Options(
        model=given.model,
        trace=given.trace,
        mask_buffer_tokens=_mask_buffer(given),
        max_prompt=given.max_prompt,
        max_output=given.max_output,
        tau_tokens=given.tau,
        num_single=given.single,
        total_pages=given.pages,
        max_runs=given.max_runs,
        window=Window(given.warm, given.run, given.longest),
    )
    place, counts = place_of(given, _TINY), _counts(given)

    def parts(found: Found, attends: Attends) -> list[Part]:
        return Figure8(place, options, counts, found, attends).parts()

    told = {key: str(value) for key, value in vars(given).items() if key != "out"}
    try:
        run = run_parts(given, parts, {"options": told}, write_table, models_waves)
    except DeviceLost as error:
        say(str(error))
        return GO_ON
    write_files(given.out)
    return finish(run)


def write_files(folder: Path) -> None:
    """Write table and figure from the results' file in the folder."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    write_table(results, folder)
    if "curves" in results["parts"].get("figure 8", {}).get("found", {}):
        _draw(results, folder)


def write_table(results: Mapping[str, Any], folder: Path) -> None:
    """Write ``table.md`` of results."""
    write_text(folder / "table.md", table(results))


def _draw(results: Mapping[str, Any], folder: Path) -> None:
    try:
        draw(results, folder / "figure-8.png")
    except Exception as error:  # noqa: BLE001 - of matplotlib or its lack; the results have it all
        say(f"no figure ({error}); elsewhere: python -m benchmarks.gpu.serving.figure {folder}")


def _mask_buffer(given: argparse.Namespace) -> int:
    if given.mask_buffer is not None:
        return int(given.mask_buffer)
    return SYNTHETIC_TRACES[given.trace].mask_buffer_tokens


def _counts(given: argparse.Namespace) -> CommitCounts:
    if given.commits is not None:
        return RecordedCommits.of(read_records(given.commits))
    mean = given.commits_per_pass or DEFAULT_COMMITS.get(name_of(given.model), _SOME_COMMITS)
    return GeometricCommits.calibrated(mean)


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="bench-gpu-serving", description=summary)
    add_options(parser, SERVING_FOLDER)
    parser.add_argument("--model", default=MODELS[0], help=f"random:NAME or a folder ({MODELS[0]})")
    parser.add_argument("--trace", choices=[*SYNTHETIC_TRACES], default="sharegpt")
    parser.add_argument(
        "--mask-buffer", type=int, metavar="TOKENS",
        help="of every request; 0: what its answer needs (the paper's: 1024 for sharegpt)",
    )  # fmt: skip
    parser.add_argument("--max-prompt", type=int, default=4096, help="leave out longer ones")
    parser.add_argument("--max-output", type=int, default=1024, help="leave out longer ones")
    parser.add_argument("--tau", type=int, default=1024, help="token budget (1024)")
    parser.add_argument("--commits-per-pass", type=float, help="on average (llada-8b: 1.7)")
    parser.add_argument("--commits", type=Path, help="records of a run whose commits to draw from")
    parser.add_argument("--single", type=int, default=16, help="requests one at a time (16)")
    parser.add_argument("--pages", type=int, default=0, help="of the pool (0: what fits)")
    parser.add_argument("--max-runs", type=int, default=20, help="rates tried at most (20)")
    parser.add_argument("--warm", type=float, default=15.0, help="of a run, not counted (15 s)")
    parser.add_argument("--run", type=float, default=48.0, help="of a run, with it (48 s)")
    parser.add_argument("--longest", type=float, default=70.0, help="then it is over (70 s)")
    return parser
