"""What both commands share: options, kernels, what is written when, the end of a run.

Called by ``benchmarks.gpu`` and ``benchmarks.gpu.serving``.
"""

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.engines import Place
from benchmarks.gpu.kernels import Commands, Compilation, nothing
from benchmarks.gpu.machine import DeviceState, describe_machine
from benchmarks.gpu.parts import Budget, Part, Record, Run, parts_of, say
from benchmarks.gpu.supervised import BAD_OPTIONS, HAS_COMPLAINTS, RESULTS, SECONDS
from benchmarks.gpu.timing import settle

MODELS = ("random:llada-8b", "random:dream-7b")
TINY_MODELS = ("tests/golden/models/llada-tiny-a", "tests/golden/models/dream-tiny-a")
"""For CPUs, which would take minutes and 32 GB to draw the others."""


def add_options(parser: argparse.ArgumentParser, folder: str) -> None:
    """Options of both commands; ``folder`` is the results' by default."""
    told = f"folder for the results ({folder})"
    parser.add_argument("--out", type=Path, default=Path(folder), help=told)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all ({SECONDS:g})")
    parser.add_argument("--device", default="cuda:0", help="torch device (cuda:0)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV (bfloat16)")
    parser.add_argument("--attention", default="flashinfer", help="backend (flashinfer)")
    parser.add_argument("--operators", default="flashinfer", help="norms, gates (flashinfer)")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="parts' times times this: for slow machines"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on behind the parts in the results' file"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="parts whose name has one of these"
    )


def place_of(given: argparse.Namespace, tiny: str) -> Place:
    """Where and how models run. ``SystemExit`` without that device.

    Args:
        tiny: the command's own options for a short run on a CPU.
    """
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        say(
            "no GPU here. To see that everything runs on a CPU: --device cpu --dtype float32 "
            f"--attention torch --operators torch {tiny}"
        )
        sys.exit(BAD_OPTIONS)
    if given.device == "cpu":
        torch.set_num_threads(1)  # the engine has no more either, for the sake of "same bytes"
    return Place(given.device, given.dtype, given.attention, given.operators)


Found = dict[str, Record]
"""The parts that were run, by name: later ones read what earlier ones found."""

Attends = Callable[[Place], Place]
"""The place with the attention that can be had there by now."""


def run_parts(
    given: argparse.Namespace,
    parts: Callable[[Found, Attends], Sequence[Part]],
    head: Record,
    write_table: Callable[[Record, Path], None],
    waves: Callable[[], Sequence[Commands]],
) -> Run:
    """Run the chosen parts within the time, kernels compiled meanwhile.

    Args:
        waves: of FlashInfer's kernels, where it is used.
        write_table: writes into a folder what is to be read of the results so far.

    Raises:
        DeviceLost: nothing more can be run in this process.
    """
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / RESULTS
    found = parts_of(file) if given.resume else {}
    device = torch.device(given.device)
    is_flashinfer_used = "flashinfer" in given.attention + given.operators
    kernels = Compilation(waves if is_flashinfer_used else nothing)
    run = Run(
        Budget(given.seconds),
        file,
        {"machine": describe_machine(), **head},
        found,
        is_well=lambda: _is_well(device),
        patience=given.patience,
        also_write=_without_fail(write_table, given.out),
        device_state=DeviceState(),
    )

    def attends(place: Place) -> Place:
        return _with_fa2(place) if not kernels.has_fa3 else place

    try:
        offered = parts(found, attends)
        run.run_all([p for p in offered if any(word in p.name for word in given.only)], kernels)
    finally:
        run.head["kernel_seconds"] = kernels.seconds
        run.head["kernel_errors"] = kernels.errors
        kernels.stop()
        run.write()
    return run


def _with_fa2(place: Place) -> Place:
    """FA2 for everything, where each batch would get the faster kernel and FA3 is not there."""
    if place.attention != "flashinfer":
        return place
    return replace(place, attention="flashinfer-fa2-blocks")


def _without_fail(write: Callable[[Record, Path], None], folder: Path) -> Callable[[Record], None]:
    """A table that cannot be made must not cost what is measured; said once, as it is made often.

    The results have it all.
    """
    told: set[str] = set()

    def try_to_write(results: Record) -> None:
        try:
            write(results, folder)
        except Exception:  # noqa: BLE001 - whatever it is, the run goes on
            trace = traceback.format_exc()
            if trace not in told:
                told.add(trace)
                say(trace)

    return try_to_write


def _is_well(device: torch.device) -> bool:
    try:
        torch.zeros(1, device=device).item()
        settle(device)
    except Exception:  # noqa: BLE001 - whatever it is, the device does not work
        return False
    return True


def finish(run: Run) -> int:
    """Say what is missing; the exit status."""
    errors = run.head["kernel_errors"].items()
    complaints = run.complaints + [f"kernel {name}: {error}" for name, error in errors]
    for complaint in complaints:
        say(f"NOT DONE  {complaint}")
    say(f"{run.budget.used_seconds:5.0f} s  {run.out}")
    return HAS_COMPLAINTS if complaints else 0
