"""``sangam loadtest recommend``: options, progress, and where the results go.

The search is ``recommend.search``'s, the words are ``recommend.tell``'s.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sangam_core.admission import ADMISSION_POLICIES
from sangam_core.counted import counted
from sangam_core.errors import ConfigurationError
from sangam_core.placements import PLACEMENTS
from sangam_loadtest.arrivals import ArrivalProcess
from sangam_loadtest.capacity import Objective
from sangam_loadtest.options import LoadOptions
from sangam_loadtest.recommend.candidates import Choices, splits_of
from sangam_loadtest.recommend.more_gpus import fewest_gpus
from sangam_loadtest.recommend.search import (
    DeploymentSearch,
    Effort,
    Finalist,
    Stage,
    best_of_modes,
)
from sangam_loadtest.recommend.tell import (
    show_deployment,
    show_recommendation,
    values_told,
)
from sangam_loadtest.recommend.trials import Scenario, Trial
from sangam_loadtest.recommend.workers import SimulationProcesses
from sangam_loadtest.recommend.written import (
    CANDIDATES_NAME,
    FIGURE_NAME,
    RECOMMENDATION_NAME,
    RECORDS_NAME,
    candidate_told,
    recommendation,
    write_candidates,
)
from sangam_loadtest.records import write_records
from sangam_loadtest.run_files import RunLabel, write_json, write_summary
from sangam_loadtest.simulate_command import paper_buffer
from sangam_loadtest.simulator.system import PAPER, Split
from sangam_loadtest.spread_options import spread_options
from sangam_loadtest.system_options import CostOptions
from sangam_router.command_errors import errors_told

_TRIED, _SEARCH = "What is tried (each may be given several times; once fixes it)", "Search"
_LOAD, _COSTS = LoadOptions(trace="sharegpt"), CostOptions()
_FULL_REQUESTS, _FULL_SECONDS = 1200, 60.0
_QUICK_REQUESTS, _QUICK_SECONDS = 400, 20.0


def _tried(help_text: str, **more: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel=_TRIED, show_default=False, **more)


@spread_options
def recommend_command(
    gpus: Annotated[int, typer.Option(min=1, help="How many there are; one a worker.")],
    rate: Annotated[
        float,
        typer.Option(min=0.000001, help="Requests a second to plan for.", rich_help_panel=_SEARCH),
    ],
    objective: Annotated[
        list[str],
        typer.Option(
            help="'mean<=7' (seconds of latency), 'first_token.p99<=3'; all given must hold.",
            rich_help_panel=_SEARCH,
        ),
    ],
    split: Annotated[list[str] | None, _tried("8C, 5P3C, 5P3D. (Default: all modes.)")] = None,
    tau: Annotated[
        list[int] | None, _tried("Budget of colocated workers. (Default: 512 to 16384.)", min=1)
    ] = None,
    tau_prefill: Annotated[
        list[int] | None, _tried("Budget of prefill workers. (Default: 8192 and 2048.)", min=1)
    ] = None,
    theta: Annotated[
        list[float] | None, _tried("Overflow threshold. (Default: 4096 to 16384, inf.)")
    ] = None,
    placement: Annotated[
        list[str] | None,
        _tried(f"{', '.join(PLACEMENTS)}. (Default: hybrid and shortest_delay.)"),
    ] = None,
    admission: Annotated[
        list[str] | None, _tried(f"{', '.join(ADMISSION_POLICIES)}. (Default: deficit.)")
    ] = None,
    max_blocks: Annotated[
        list[float] | None,
        _tried("New requests wait while the fleet holds so many blocks a decoder. (Default: inf.)"),
    ] = None,
    mask_buffer: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="L of every request, tokens. (Default: as `simulate` has it.)",
            rich_help_panel="Answers",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer settings, shorter runs.", rich_help_panel=_SEARCH),
    ] = False,
    more_gpus: Annotated[
        bool,
        typer.Option(
            "--more-gpus",
            help="If nothing holds: look for how many GPUs would do, up to twice as many.",
            rich_help_panel=_SEARCH,
        ),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes. (Default: one a core.)", rich_help_panel=_SEARCH),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder of the figure, the numbers and the best's records.")
    ] = Path(".sangam/loadtest/recommend"),
    load: LoadOptions = _LOAD,
    costs: CostOptions = _COSTS,
) -> None:
    """Find which mode, split and settings to run on so many GPUs, by simulation.

    Successive halving over what is tried, at the rate asked for; then the highest rate at which
    the best of each mode holds the objectives. Every deployment gets the same requests; the same
    options give the same answer.
    """
    console = Console(highlight=False)
    with errors_told():
        choices = _choices(
            Choices(tuple(split or splits_of(gpus)), mask_buffer=mask_buffer),
            quick,
            colocated_taus=tau,
            hybrid_taus=tau,
            prefill_taus=tau_prefill,
            thetas=theta,
            placements=placement,
            admissions=admission,
            max_blocks=max_blocks,
        )
        _check_splits(choices, gpus)
        scenario, effort = _scenario(load, costs, rate, objective, quick)
        console.print(_asked_told(gpus, costs, load, scenario, effort), soft_wrap=True)
        watch = _Watch(console)
        num_jobs = jobs or len(os.sched_getaffinity(0))
        with SimulationProcesses(scenario, num_jobs) as processes:
            search = DeploymentSearch(
                processes, choices, effort, watch.stage, watch.trial, is_split_free=split is None
            )
            watch.search = search
            try:
                with watch.bar:
                    finalists = search.run()
                    fewest = None
                    if more_gpus and not finalists[0].holds:
                        nearest = [f.candidate for f in best_of_modes(finalists)]
                        fewest = fewest_gpus(nearest, gpus, 2 * gpus, search.holding_on)
            except KeyboardInterrupt:
                _show_interrupted(search, scenario, output, console)
                raise
        show_recommendation(finalists, scenario.objectives, console)
        if more_gpus and not finalists[0].holds:
            _show_fewest(fewest, gpus, scenario, console)
        show_deployment((fewest or finalists[0].trial).candidate, costs.model, console)
        asked = _asked(gpus, load, costs, choices, scenario, effort)
        _write(finalists, fewest, search, scenario, asked, output)
        for name in (FIGURE_NAME, RECOMMENDATION_NAME, CANDIDATES_NAME, RECORDS_NAME):
            console.print(f"{output / name}", soft_wrap=True)


def _choices(choices: Choices, is_quick: bool, **given: Sequence[Any] | None) -> Choices:
    """What was given in place of the grids."""
    if is_quick:
        choices = replace(
            choices,
            colocated_taus=(1024, 4096, 16384),
            hybrid_taus=(1024, 4096),
            thetas=(8192.0, float("inf")),
        )
    for name, known in (("placements", PLACEMENTS), ("admissions", ADMISSION_POLICIES)):
        for value in given[name] or ():
            if value not in known:
                raise ConfigurationError(
                    f"--{name[:-1]} {value}: must be one of {', '.join(known)}"
                )
    for name, option in (("thetas", "theta"), ("max_blocks", "max-blocks")):
        if any(not value > 0 for value in given[name] or ()):
            raise ConfigurationError(f"--{option} must be positive")
    named: dict[str, Any] = {
        name: tuple(dict.fromkeys(values)) for name, values in given.items() if values
    }
    return replace(choices, **named)


def _check_splits(choices: Choices, num_gpus: int) -> None:
    for split in choices.splits:
        if (found := Split.parse(split).num_workers) != num_gpus:
            raise ConfigurationError(
                f"--split {split}: has {counted(found, 'worker')} for {counted(num_gpus, 'GPU')}"
            )


def _scenario(
    load: LoadOptions, costs: CostOptions, rate: float, objective: Sequence[str], is_quick: bool
) -> tuple[Scenario, Effort]:
    objectives = tuple(dict.fromkeys(Objective.parse(text) for text in objective))
    if load.requests is None and load.duration is None:
        least, seconds = (
            (_QUICK_REQUESTS, _QUICK_SECONDS) if is_quick else (_FULL_REQUESTS, _FULL_SECONDS)
        )
        load = replace(load, requests=max(least, ceil(rate * seconds)))
    asked = load.load(rate)
    buffer = paper_buffer(load.trace) if costs.system == PAPER else None
    costs.cost_model()  # names that are not in the table are told before any process starts
    scenario = Scenario(asked, costs, costs.commits(), objectives, costs.total_pages(), buffer)
    num_requests = asked.num_requests or max(1, ceil(rate * (asked.duration_seconds or 0)))
    if is_quick:
        return scenario, Effort(num_requests, 1, 1, 0.1, lower_rates=(0.5,))
    return scenario, Effort(num_requests)


def _asked_told(
    gpus: int, costs: CostOptions, load: LoadOptions, scenario: Scenario, effort: Effort
) -> str:
    objectives = ", ".join(str(objective) for objective in scenario.objectives)
    arrivals = "" if load.arrivals is ArrivalProcess.POISSON else f" ({load.arrivals})"
    return (
        f"{gpus} x {costs.gpu}, {costs.model} {costs.quantization}, {load.trace} at "
        f"{scenario.load.arrivals.rate:g} requests/s{arrivals}, {objectives}; "
        f"full runs of {counted(effort.num_requests, 'request')}"
    )


def _asked(
    gpus: int,
    load: LoadOptions,
    costs: CostOptions,
    choices: Choices,
    scenario: Scenario,
    effort: Effort,
) -> dict[str, Any]:
    """What was asked for, as plain data."""
    found = {
        "gpus": gpus,
        **asdict(load),
        **asdict(costs),
        "rate": scenario.load.arrivals.rate,
        "total_pages": scenario.total_pages,
        "effort": asdict(effort),
        "tried": {k: [str(v) for v in values or ()] for k, values in _tried_values(choices)},
    }
    return {k: str(v) if isinstance(v, Path) else v for k, v in found.items()}


def _tried_values(choices: Choices) -> list[tuple[str, Sequence[Any]]]:
    return [(k, v if isinstance(v, tuple) else (v,)) for k, v in asdict(choices).items()]


class _Watch:
    """A bar for the stage that runs; a line for each stage that has ended."""

    def __init__(self, console: Console) -> None:
        self.search: DeploymentSearch | None = None
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._console = console
        self._task = self.bar.add_task("")

    def stage(self, stage: Stage) -> None:
        best = self.search.best_so_far() if self.search else None
        if best is not None:
            self._console.print(f"  best so far: {best.candidate}", soft_wrap=True)
        self._console.print(f"{stage.title} ({stage.num_trials} simulations)", soft_wrap=True)
        self.bar.reset(self._task, description=stage.title, total=stage.num_trials)

    def trial(self, trial: Trial) -> None:
        self.bar.advance(self._task)


def _show_interrupted(
    search: DeploymentSearch, scenario: Scenario, output: Path, console: Console
) -> None:
    best = search.best_so_far()
    if best is None:
        console.print("interrupted before anything was found")
        return
    told = f"after runs of {counted(best.job.num_requests, 'request')}"
    console.print(f"interrupted; best so far ({told}): {best.candidate}", soft_wrap=True)
    console.print(f"  {values_told(best, scenario.objectives)}", soft_wrap=True)
    write_candidates(search.trials, scenario.objectives, output)
    console.print(f"{output / CANDIDATES_NAME}", soft_wrap=True)


def _do(num_gpus: int) -> str:
    return f"{counted(num_gpus, 'GPU')} {'does' if num_gpus == 1 else 'do'}"


def _show_fewest(fewest: Trial | None, gpus: int, scenario: Scenario, console: Console) -> None:
    if fewest is None:
        console.print(f"not even {2 * gpus} GPUs do", soft_wrap=True)
        return
    console.print(
        f"{_do(fewest.candidate.num_gpus)}: {fewest.candidate}: "
        f"{values_told(fewest, scenario.objectives)}",
        soft_wrap=True,
    )


def _write(
    finalists: Sequence[Finalist],
    fewest: Trial | None,
    search: DeploymentSearch,
    scenario: Scenario,
    asked: dict[str, Any],
    output: Path,
) -> None:
    # Here, since matplotlib takes most of a second to import, which no other command should pay
    from sangam_loadtest.recommend.figure import draw_capacity

    objectives, best = scenario.objectives, finalists[0]
    write_candidates(search.trials, objectives, output)
    content = recommendation(finalists, objectives, asked)
    content["fewest_gpus"] = (
        None if fewest is None else candidate_told(fewest.candidate, asked["model"])
    )
    write_json(output / RECOMMENDATION_NAME, content)
    title = f"{asked['gpus']} x {asked['gpu']}, {asked['model']}, {asked['trace']}"
    draw_capacity(best_of_modes(finalists), objectives, title, output / FIGURE_NAME)
    job = best.trial.job
    records = output / RECORDS_NAME
    write_records(records, best.trial.records)
    write_summary(
        records,
        command="recommend",
        label=RunLabel.of(
            "simulated",
            scenario.load,
            configuration=job.candidate.split,
            model=scenario.costs.model,
            system=scenario.costs.system,
            tau_tokens=job.candidate.policy.tau,
        ),
        options=asked,
        load=scenario.load,
        summary=best.trial.summary,
    )
