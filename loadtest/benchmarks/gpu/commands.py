"""What both commands share: options, the machine in words, kernels, the end of a run.

Called by ``benchmarks.gpu`` and ``benchmarks.gpu.serving``.
"""

import argparse
import faulthandler
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.engines import Place
from benchmarks.gpu.kernels import Compilation, flashinfer_compilation
from benchmarks.gpu.parts import Budget, Part, Run, say

MODELS = ("random:llada-8b", "random:dream-7b")
_GRACE_SECONDS = 15.0


def add_options(parser: argparse.ArgumentParser, folder: str) -> None:
    """Options of both commands."""
    parser.add_argument("--out", type=Path, default=Path(folder), help=f"folder ({folder})")
    parser.add_argument("--seconds", type=float, default=465.0, help="time for all (465)")
    parser.add_argument("--device", default="cuda:0", help="torch device (cuda:0)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV (bfloat16)")
    parser.add_argument("--attention", default="flashinfer", help="backend (flashinfer)")
    parser.add_argument("--operators", default="flashinfer", help="norms, gates (flashinfer)")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="parts whose name has one of these"
    )


def place_of(given: argparse.Namespace) -> Place:
    """Where and how models run. ``SystemExit`` without that device."""
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit(
            "no GPU here. To see that everything runs on a CPU: --device cpu --dtype float32 "
            "--attention torch --operators torch --sizes tiny"
        )
    if given.device == "cpu":
        torch.set_num_threads(1)  # the engine has no more either, for the sake of "same bytes"
    return Place(given.device, given.dtype, given.attention, given.operators)


def run_parts(
    given: argparse.Namespace, parts: Sequence[Part], head: dict[str, object] | None = None
) -> Run:
    """Run the chosen parts within the time, kernels compiled meanwhile."""
    given.out.mkdir(parents=True, exist_ok=True)
    # A device that hangs is not asked again: the file has every part that was over.
    last = given.seconds + _GRACE_SECONDS
    faulthandler.dump_traceback_later(last, file=2, exit=True)
    run = Run(
        Budget(given.seconds), given.out / "results.json", {"machine": _machine(), **(head or {})}
    )
    kernels = _started_kernels(given)
    try:
        chosen = [part for part in parts if any(word in part.name for word in given.only)]
        run.run_all(chosen, kernels)
    finally:
        run.head["kernel_seconds"] = kernels.seconds
        run.head["kernel_errors"] = kernels.errors
        kernels.stop()
        run.write()
        faulthandler.cancel_dump_traceback_later()
    return run


def _started_kernels(given: argparse.Namespace) -> Compilation:
    """What FlashInfer needs, under way; nothing without FlashInfer."""
    if "flashinfer" not in given.attention + given.operators:
        return Compilation({})
    return flashinfer_compilation()


def finish(run: Run) -> int:
    """Say what is missing; the exit status."""
    errors = run.head["kernel_errors"].items()
    complaints = run.complaints + [f"kernel {name}: {error}" for name, error in errors]
    for complaint in complaints:
        say(f"NOT DONE  {complaint}")
    say(f"{run.budget.used_seconds:5.0f} s  {run.out}")
    return 1 if complaints else 0


def _machine() -> dict[str, str]:
    """What ran it."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
        asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,temperature.gpu"]
        try:
            said = subprocess.run(
                [*asked, "--format=csv,noheader"],
                capture_output=True,
                timeout=10,
                text=True,
                check=False,
            )
            found["driver, clock, temperature"] = said.stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            found["driver, clock, temperature"] = f"unknown ({error})"
    else:
        found["processor"] = platform.machine()
    return found
