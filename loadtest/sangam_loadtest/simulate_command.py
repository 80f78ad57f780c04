"""``sangam loadtest simulate``: options, and where the results go. The work is the simulator's."""

import csv
import math
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from sangam_loadtest.load import planned
from sangam_loadtest.options import LoadOptions, RateOption, RecordsOption
from sangam_loadtest.records import write_record_lines
from sangam_loadtest.run_files import RunLabel, default_records_path, opened, write_summary
from sangam_loadtest.show import show_summary
from sangam_loadtest.simulator.simulate import Simulation, simulate
from sangam_loadtest.simulator.system import PAPER, Split
from sangam_loadtest.simulator.worker import Iteration
from sangam_loadtest.spread_options import spread_options
from sangam_loadtest.summary import summarise
from sangam_loadtest.system_options import CostOptions, PolicyOptions
from sangam_loadtest.traces.synthetic import SYNTHETIC_TRACES
from sangam_router.command_errors import errors_told

_PASS_COLUMNS = (
    "model",
    "engine",
    "launch",
    "prefill_tokens",
    "decode_blocks",
    "context_tokens",
    "total_ms",
)
_LOAD, _COSTS, _POLICY = LoadOptions(trace="sharegpt"), CostOptions(), PolicyOptions()


@spread_options
def simulate_command(
    split: Annotated[
        str,
        typer.Argument(help="Workers by role, as in the paper: 8C, 4P4D, 5P3C."),
    ],
    rate: RateOption = None,
    output: RecordsOption = None,
    label: Annotated[
        str | None,
        typer.Option(
            help="What reports call this deployment. (Default: split and unusual options.)"
        ),
    ] = None,
    passes: Annotated[
        bool, typer.Option(help="Write NAME.passes.csv: iteration time by batch.")
    ] = False,
    commits_kept: Annotated[
        bool, typer.Option("--keep-commits", help="Records tell what each pass committed.")
    ] = False,
    load: LoadOptions = _LOAD,
    costs: CostOptions = _COSTS,
    policy: PolicyOptions = _POLICY,
) -> None:
    """Simulate a deployment: the real scheduler and placement under virtual time.

    Passes cost what the GPU's and the model's constants say. The same options give the same
    records.
    """
    console = Console(highlight=False)
    with errors_told():
        asked = load.load(rate)
        plan = planned(asked)
        buffer = paper_buffer(load.trace) if costs.system == PAPER else None
        system = policy.system(
            Split.parse(split), costs.total_pages(), system=costs.system, buffer=buffer
        )
        records_path = output or default_records_path()
        samples = PassSamples(costs.model, costs.system)
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(f"simulating {system.split}", total=len(plan))
            result = simulate(
                plan,
                system,
                costs.cost_model(),
                costs.commits(),
                seed=load.seed,
                keeps_commits=commits_kept,
                watch=samples.add if passes else None,
                progress=lambda done: bar.update(task, completed=done),
            )
        summary = summarise(result.records)
        with opened(records_path) as file:
            write_record_lines(file, result.records)
        summary_path = write_summary(
            records_path,
            command="simulate",
            label=RunLabel.of(
                "simulated",
                asked,
                configuration=label or policy.named(str(system.split)),
                model=costs.model,
                system=costs.system,
                tau_tokens=policy.tau,
            ),
            options={
                **asdict(asked),
                **{name: _plain(value) for name, value in asdict(costs).items()},
                **{name: _plain(value) for name, value in asdict(policy).items()},
                "split": str(system.split),
                "total_pages": system.total_pages,
            },
            load=asked,
            summary=summary,
        )
        show_summary(summary, console)
        _show_workers(result, console)
        console.print(f"records: {records_path}\nsummary: {summary_path}", soft_wrap=True)
        if passes:
            passes_path = records_path.with_suffix(".passes.csv")
            samples.write(passes_path)
            console.print(f"passes: {passes_path}", soft_wrap=True)


def paper_buffer(trace: str) -> int | None:
    """L of a trace in the paper; None for a trace that it does not have."""
    known = SYNTHETIC_TRACES.get(trace)
    return None if known is None else known.mask_buffer_tokens


class PassSamples:
    """Times of decode-only iterations by batch, in the columns of a benchmark's passes."""

    def __init__(self, model: str, system: str) -> None:
        self._model, self._system = model, system
        self._seconds: dict[int, list[float]] = defaultdict(list)
        self._keys: dict[int, list[float]] = defaultdict(list)

    def add(self, iteration: Iteration) -> None:
        """Take in an iteration; those with a prefill are passed over."""
        batch = iteration.batch
        if batch.num_decodes and not batch.num_prefills:
            self._seconds[batch.num_decodes].append(iteration.seconds)
            self._keys[batch.num_decodes].append(batch.decode_keys / batch.num_decodes)

    def write(self, path: Path) -> None:
        """One row a batch: the median of its iterations."""
        with opened(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(_PASS_COLUMNS)
            for blocks in sorted(self._seconds):
                writer.writerow(
                    [
                        self._model,
                        f"simulated-{self._system}",
                        "graph",
                        0,
                        blocks,
                        round(median(self._keys[blocks])),
                        round(1e3 * median(self._seconds[blocks]), 4),
                    ]
                )


def _plain(value: object) -> object:
    """A value as JSON can say it, which knows no infinity."""
    return str(value) if isinstance(value, Path) or value == math.inf else value


def _show_workers(result: Simulation, console: Console) -> None:
    busy = ", ".join(f"{share:.0%}" for share in result.busy_shares[:16])
    more = "" if len(result.busy_shares) <= 16 else ", ..."
    console.print(
        f"{result.num_iterations} iterations in {result.virtual_seconds:.1f} s of virtual time; "
        f"workers busy: {busy}{more}",
        soft_wrap=True,
    )
