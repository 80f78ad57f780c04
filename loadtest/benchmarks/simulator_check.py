"""Does the simulator agree with real workers? The same requests, sent and simulated.

On this machine: measures what passes cost (``pass_costs``) and fits the cost model to them;
starts a router and workers with the shipped model; a first run at a low rate gives the host's
part of the costs (``host_costs``) and the commits of passes; then runs with other requests at
higher rates are compared with their simulations, by mean, P50 and P99 of the latency.
``make bench-simulator`` runs it. Exits with status 1 where mean or P99 differ by more than the
tolerance.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table as Shown

from benchmarks.host_costs import Simulated, with_host_costs
from benchmarks.local_runs import LocalFleet, keep_simulated, local_fleet
from sangam_core.errors import ConfigurationError, SangamError
from sangam_loadtest.arrivals import Arrivals
from sangam_loadtest.costs.constants import SystemConstants
from sangam_loadtest.costs.fit import fit
from sangam_loadtest.costs.measurements import Measurements, read_passes
from sangam_loadtest.costs.model import CostModel
from sangam_loadtest.costs.shapes import shape_of
from sangam_loadtest.costs.table import Table, read_table
from sangam_loadtest.load import Load, planned
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.simulator.commits import CommitCounts, GeometricCommits, RecordedCommits
from sangam_loadtest.simulator.simulate import simulate
from sangam_loadtest.simulator.system import Split, System
from sangam_loadtest.simulator.worker import Iteration
from sangam_loadtest.summary import Distribution
from sangam_loadtest.traces.source import TraceSpec
from sangam_worker.settings import DEFAULT_TOTAL_PAGES

MODEL, DEVICE, SYSTEM = "small", "cpu", "sangam"
FLEETS = ("1C:0.35,0.55", "1P1D:0.15")
"""What two cores can hold: one for a worker's passes, one for router, Redis and client. More of
``1P1D`` wants a core more; without it processes wait for cores, which is not simulated."""
BLOCK_LENGTH = 32
_PROMPT_TOKENS, _MOST_BLOCKS, _TRACE_LENGTH = (32, 400), 4, 600
_FIRST_LOAD, _FIRST_SECONDS = 0.2, 35.0
"""The first run's share of what the fleet could take if hosts cost nothing and ..."""
_FIRST_COMMITS = GeometricCommits.calibrated(8.0)
"""... passes committed as many tokens as this; by then nothing else is known of either."""
_WARMUP_SECONDS = 2.0
_SEEDS_SIMULATED = 5
"""Commits are drawn: the simulations of a run with so many seeds are pooled."""
_PASS_GRID = (
    "--prefill-tokens", "64", "128", "256", "384", "512", "--decode-blocks", "1", "2", "4", "8",
    "--context-tokens", "64", "256", "512", "--masks", "16", "--max-seconds", "45",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Agreement:
    """One run and its simulation.

    Attributes:
        load: share of the fleet's capacity that arrives. measured, simulated: latencies.
        others_cores: cores that other processes used during the run.
    """

    split: str
    rate: float
    load: float
    measured: Distribution
    simulated: Distribution
    others_cores: float | None

    @property
    def mean_ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated.mean / self.measured.mean

    @property
    def p99_ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated.p99 / self.measured.p99

    def is_within(self, tolerance: float) -> bool:
        """Whether mean and P99 differ by no more than a share of the measured ones."""
        return all(abs(ratio - 1) <= tolerance for ratio in (self.mean_ratio, self.p99_ratio))


@dataclass(frozen=True, slots=True)
class Deployment:
    """A simulated fleet with constants: takes any load."""

    system: System
    table: Table
    commits: CommitCounts

    def with_constants(self, constants: SystemConstants) -> "Deployment":
        """The same with other constants of the host."""
        return replace(self, table=self.table.with_entry("systems", SYSTEM, constants))

    def simulate(self, load: Load, seed: int = 0) -> Simulated:
        """Take a load; the seed is that of the commits."""
        costs = CostModel(self.table, DEVICE, shape_of(MODEL), SYSTEM)
        iterations: list[Iteration] = []
        result = simulate(
            planned(load), self.system, costs, self.commits, seed=seed, watch=iterations.append
        )
        return Simulated(result.records, iterations)

    def capacity(self, load: Load) -> float:
        """Requests a second that it answers when far too many come at once."""
        flood = replace(load.at(1000.0), num_requests=300, duration_seconds=None)
        records = self.simulate(flood).records
        return len(records) / max(r.scheduled_seconds + (r.latency_seconds or 0) for r in records)


def latencies(records: Sequence[RequestRecord]) -> Distribution:
    """Of the requests that count."""
    return Distribution.of(
        [r.latency_seconds for r in records if r.latency_seconds is not None and not r.is_warmup]
    )


def write_trace(path: Path, seed: int) -> None:
    """Lengths for the check: answers of whole blocks, so that every block runs to its end."""
    rng = random.Random(seed)
    lengths = (
        f"{rng.randint(*_PROMPT_TOKENS)},{BLOCK_LENGTH * rng.randint(1, _MOST_BLOCKS)}"
        for _ in range(_TRACE_LENGTH)
    )
    lines = ["num_prefill_tokens,num_decode_tokens", *lengths]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line, measure, simulate, print and write the comparison."""
    given = _arguments()
    console = Console(highlight=False)
    given.out.mkdir(parents=True, exist_ok=True)
    write_trace(given.out / "lengths.csv", given.seed)
    try:
        passes = given.passes or _measured_passes(given.out / "passes.csv", console)
        measured = Measurements(passes=read_passes(passes))
        table = fit(measured, read_table(None), DEVICE).table
        found: list[Agreement] = []
        for split, loads in given.fleets:
            found += asyncio.run(_checked(split, loads, table, given, console))
    except (SangamError, subprocess.SubprocessError) as error:
        sys.exit(f"error: {error}")
    console.print(_shown(found))
    content = [{**asdict(item), "mean_ratio": item.mean_ratio, "p99_ratio": item.p99_ratio}
               for item in found]  # fmt: skip
    results = given.out / "agreement.json"
    results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {results}", soft_wrap=True)
    if not all(item.is_within(given.tolerance) for item in found):
        sys.exit(f"mean or P99 differ by more than {given.tolerance:.0%}")


def _arguments() -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="simulator_check", description=summary)
    fleets = [_fleet(text) for text in FLEETS]
    parser.add_argument(
        "--fleets", type=_fleet, nargs="+", metavar="SPLIT:LOADS", default=fleets,
        help=f"workers, and the loads of their runs as shares of capacity ({' '.join(FLEETS)})",
    )  # fmt: skip
    parser.add_argument("--passes", type=Path, help="measured passes (default: measures them)")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a run (30)")
    parser.add_argument("--seed", type=int, default=1, help="of requests and arrivals (1)")
    parser.add_argument("--tolerance", type=float, default=0.2, help="share (0.2)")
    parser.add_argument("--out", type=Path, default=Path(".sangam/simulator-check"), help="folder")
    return parser.parse_args()


def _fleet(text: str) -> tuple[Split, list[float]]:
    """``1C:0.35,0.7`` as a split and loads."""
    split, _, loads = text.partition(":")
    try:
        shares = [float(load) for load in loads.split(",")]
        if not all(0 < share < 1 for share in shares):
            raise ValueError
    except ValueError:
        problem = f"{text!r} must be like 1C:0.35,0.7, with loads between 0 and 1"
        raise argparse.ArgumentTypeError(problem) from None
    try:
        return Split.parse(split), shares
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _measured_passes(path: Path, console: Console) -> Path:
    """Measure passes in a process of its own, as workers are."""
    console.print("measuring what passes cost here")
    command = [sys.executable, "-m", "benchmarks.pass_costs", "--out", str(path), *_PASS_GRID]
    subprocess.run(command, check=True, timeout=240)
    return path


async def _checked(
    split: Split,
    loads: Sequence[float],
    table: Table,
    given: argparse.Namespace,
    console: Console,
) -> list[Agreement]:
    async with local_fleet(split, given.out, console) as fleet:
        bare = Deployment(System(split, DEFAULT_TOTAL_PAGES), table, _FIRST_COMMITS)
        some = _load(given, 1.0, _FIRST_SECONDS, given.seed)
        first = some.at(round(_FIRST_LOAD * await asyncio.to_thread(bare.capacity, some), 2))
        measured = await fleet.run(first, f"{split}-first")
        deployment = await asyncio.to_thread(_calibrated, bare, first, measured.records)
        capacity = await asyncio.to_thread(deployment.capacity, first)
        console.print(f"{split}: simulated capacity {capacity:.1f} requests/s")
        return [
            await _agreement(fleet, deployment, capacity, share, given, given.seed + 1 + index)
            for index, share in enumerate(loads)
        ]


def _calibrated(bare: Deployment, load: Load, measured: Sequence[RequestRecord]) -> Deployment:
    """The deployment with the commits and the host's costs of a measured run under ``load``."""
    known = replace(bare, commits=RecordedCommits.of(measured))
    constants = with_host_costs(
        known.table.systems[SYSTEM],
        measured,
        lambda constants: known.with_constants(constants).simulate(load),
    )
    return known.with_constants(constants)


async def _agreement(
    fleet: LocalFleet,
    deployment: Deployment,
    capacity: float,
    share: float,
    given: argparse.Namespace,
    seed: int,
) -> Agreement:
    rate = round(share * capacity, 2)
    load = _load(given, rate, given.seconds, seed)
    name = f"{fleet.split}-{rate:g}"
    measured = await fleet.run(load, name)
    pooled: list[RequestRecord] = []
    for number in range(_SEEDS_SIMULATED):
        pooled += (await asyncio.to_thread(deployment.simulate, load, number)).records
    keep_simulated(given.out / f"{name}-simulated.jsonl", load, fleet.split, pooled)
    return Agreement(
        str(fleet.split),
        rate,
        share,
        latencies(measured.records),
        latencies(pooled),
        measured.others_cores,
    )


def _load(given: argparse.Namespace, rate: float, seconds: float, seed: int) -> Load:
    return Load(
        trace=TraceSpec(str(given.out / "lengths.csv"), seed, is_repeated=True),
        arrivals=Arrivals(rate=rate, seed=seed),
        duration_seconds=seconds,
        warmup_seconds=_WARMUP_SECONDS,
    )


def _shown(found: Sequence[Agreement]) -> Shown:
    shown = Shown("workers", "rate/s", "load", "answers", title="latency, seconds", box=None)
    for name in ("mean", "P50", "P99"):
        for column in (f"{name} real", "simulated", "ratio"):
            shown.add_column(column, justify="right")
    shown.add_column("others' cores", justify="right")
    for item in found:
        real, simulated = item.measured, item.simulated
        cells = [item.split, f"{item.rate:g}", f"{item.load:.0%}", str(real.count)]
        for name in ("mean", "p50", "p99"):
            a, b = getattr(real, name), getattr(simulated, name)
            cells += [f"{a:.3f}", f"{b:.3f}", f"{b / a:.2f}"]
        cells.append("?" if item.others_cores is None else f"{item.others_cores:.1f}")
        shown.add_row(*cells)
    return shown


if __name__ == "__main__":
    main()
