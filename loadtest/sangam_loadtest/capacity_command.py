"""``sangam loadtest capacity``: options, probes of a server, the state file and the result."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from sangam_core.errors import ConfigurationError
from sangam_loadtest.capacity import Capacity, Objective, ProbeResult, Search, find_capacity
from sangam_loadtest.capacity_state import CapacityState
from sangam_loadtest.options import LoadOptions, ServerOptions
from sangam_loadtest.run import RunOptions, run
from sangam_loadtest.run_files import write_json
from sangam_loadtest.spread_options import spread_options
from sangam_loadtest.summary import Summary
from sangam_router.command_errors import errors_told

_SEARCH = "Search"
_LOAD, _SERVER = LoadOptions(warmup=10.0), ServerOptions(timeout=120.0)


@spread_options
def capacity_command(
    objective: Annotated[
        list[str],
        typer.Option(
            help="'mean<=7' (seconds of latency), 'first_token.p99<=3'; all given must hold.",
            rich_help_panel=_SEARCH,
        ),
    ],
    start_rate: Annotated[
        float, typer.Option(min=0.001, help="First rate probed.", rich_help_panel=_SEARCH)
    ] = 1.0,
    min_rate: Annotated[
        float | None,
        typer.Option(
            min=0.0001,
            help="Lowest rate probed. (Default: a 16th of the first.)",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    max_rate: Annotated[
        float, typer.Option(min=0.001, help="Highest rate probed.", rich_help_panel=_SEARCH)
    ] = 4096.0,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.001, max=0.5, help="Relative, of the rate found.", rich_help_panel=_SEARCH
        ),
    ] = 0.05,
    failures: Annotated[
        float,
        typer.Option(
            min=0, max=0.5, help="Share of requests that may fail.", rich_help_panel=_SEARCH
        ),
    ] = 0.0,
    settle: Annotated[
        float, typer.Option(min=0, help="Seconds between probes.", rich_help_panel=_SEARCH)
    ] = 5.0,
    state: Annotated[
        Path, typer.Option(help="Probes made so far; the same command goes on from there.")
    ] = Path(".sangam/loadtest/capacity-state.json"),
    output: Annotated[Path, typer.Option(help="The result, as JSON.")] = Path(
        ".sangam/loadtest/capacity.json"
    ),
    load: LoadOptions = _LOAD,
    server: ServerOptions = _SERVER,
) -> None:
    """Find the highest rate at which objectives hold: doubling, then bisection.

    Interrupted, the same command goes on where it was; failures and time-outs are violations, but
    where nearly all requests are refused (4xx, but 408 and 429) the search ends with an error.
    """
    console = Console(highlight=False)
    with errors_told():
        search = Search(
            tuple(Objective.parse(text) for text in objective),
            start_rate=start_rate,
            min_rate=min_rate or start_rate / 16,
            max_rate=max_rate,
            tolerance=tolerance,
            max_failed_share=failures,
        )
        base = server.run_options(load.load(start_rate))
        kept = CapacityState(state, search_parameters(search, base))
        if kept.probes:
            console.print(f"{state}: {len(kept.probes)} probes were made already")

        def told(result: ProbeResult) -> None:
            kept.add(result)
            _show_probe(result, console)

        probe = server_probe(base, console, settle)
        try:
            found = find_capacity(search, probe, tuple(kept.probes), told)
        except KeyboardInterrupt:
            _show_interrupted(kept, state)
            raise
        write_json(output, {"parameters": search_parameters(search, base), **found.to_json()})
        _show_capacity(found, search, console)
        console.print(f"result: {output}", soft_wrap=True)


def _show_interrupted(kept: CapacityState, path: Path) -> None:
    """On standard error; the exit status is that of every interrupted command."""
    goes_on = f"the same command goes on from {path}"
    told = goes_on if kept.probes else "no probe was complete yet"
    Console(stderr=True, highlight=False).print(Text(f"interrupted; {told}"), soft_wrap=True)


def search_parameters(search: Search, base: RunOptions) -> dict[str, Any]:
    """All that a probe's result depends on but its rate; the key stays out of files."""
    asked = base.asked()
    del asked["arrivals"]["rate"]
    return {
        "objectives": sorted(str(objective) for objective in search.objectives),
        "max_failed_share": search.max_failed_share,
        "run": asked,
    }


def server_probe(
    base: RunOptions, console: Console, settle_seconds: float
) -> Callable[[float], Summary]:
    """Probes of a server: the same requests at each rate, a pause between two probes.

    A probe ends when each of its requests has, so nothing of it is left but what the server gives
    up on its own; the pause is for that.
    """
    num_probes = 0

    def probe(rate: float) -> Summary:
        nonlocal num_probes
        if num_probes and settle_seconds:
            time.sleep(settle_seconds)
        num_probes += 1
        options = replace(base, load=base.load.at(rate))
        result = run(options, console, None, title=f"{rate:.4g} requests/s")
        if result.is_interrupted:
            raise KeyboardInterrupt
        if not result.summary.num_requests:
            raise ConfigurationError("a probe sent no request; make it longer (--duration)")
        if result.summary.errors:
            console.print(f"failed: {result.summary.failures}", soft_wrap=True, markup=False)
        return result.summary

    return probe


def _show_probe(result: ProbeResult, console: Console) -> None:
    values = ", ".join(
        f"{name.split('<=')[0]} {value:.3f} s" if value is not None else f"{name}: none"
        for name, value in result.values.items()
    )
    verdict = Text("holds", style="green") if result.holds else Text("violated", style="red")
    told = Text.assemble(f"{result.rate:.4g} requests/s: ", verdict, f", {values}")
    if result.num_failed:
        told.append(f", {result.num_failed} of {result.num_requests} failed")
    console.print(told, soft_wrap=True)


def _show_capacity(found: Capacity, search: Search, console: Console) -> None:
    objectives = ", ".join(str(objective) for objective in search.objectives)
    if found.highest_held is None:
        told = f"not even {found.lowest_violated:.4g} requests/s hold {objectives}"
    elif found.lowest_violated is None:
        told = f"{found.highest_held:.4g} requests/s, the highest rate probed, hold {objectives}"
    else:
        told = (
            f"capacity: {found.highest_held:.4g} requests/s hold {objectives}; "
            f"{found.lowest_violated:.4g} do not"
        )
    console.print(told, soft_wrap=True)
