"""``sangam loadtest run``: options, and where the results go. The work is ``run``'s."""

from typing import Annotated

import typer
from rich.console import Console

from sangam_core.errors import SangamError
from sangam_loadtest.arrivals import ArrivalProcess
from sangam_loadtest.options import LoadOptions, RateOption, RecordsOption, ServerOptions
from sangam_loadtest.run import RunOptions, RunResult, run
from sangam_loadtest.run_files import RunLabel, default_records_path, write_summary
from sangam_loadtest.show import show_summary
from sangam_loadtest.spread_options import spread_options
from sangam_loadtest.summary import Summary
from sangam_router.command_errors import errors_told

_INTERRUPTED_STATUS = 130
_LEAST_ANSWERED_SHARE = 0.5
_LOAD, _SERVER = LoadOptions(), ServerOptions()


@spread_options
def run_command(
    rate: RateOption = None,
    output: RecordsOption = None,
    label: Annotated[
        str | None,
        typer.Option(help="What reports call this deployment, e.g. '4P4D'."),
    ] = None,
    load: LoadOptions = _LOAD,
    server: ServerOptions = _SERVER,
) -> None:
    """Send requests at a rate, whatever the server makes of them, and measure what comes back.

    Ctrl-C ends the run early and keeps what there is. The exit status is 1 where fewer than half of
    the requests were answered.
    """
    console = Console(highlight=False)
    with errors_told():
        chosen = server.run_options(load.load(rate))
        records = output or default_records_path()
        true_rate = chosen.load.true_rate
        if true_rate is not None and load.arrivals is ArrivalProcess.CLIPPED:
            console.print(f"clipped gaps: the true rate is {true_rate:.4g} requests/s")
        result = run(chosen, console, records)
        summary_path = write_summary(
            records,
            command="run",
            label=label_of(label, chosen, result),
            options=chosen.asked() | {"model": result.model},
            load=chosen.load,
            summary=result.summary,
            is_interrupted=result.is_interrupted,
        )
        show_summary(result.summary, console)
        console.print(f"records: {records}\nsummary: {summary_path}", soft_wrap=True)
        if result.is_interrupted:
            raise typer.Exit(_INTERRUPTED_STATUS)
        _require_answers(result.summary)


def _require_answers(summary: Summary) -> None:
    """A run mostly without answers has failed, for whoever runs it in a script."""
    if not summary.num_completed:
        raise SangamError("no request was answered")
    if summary.num_completed < _LEAST_ANSWERED_SHARE * summary.num_requests:
        raise SangamError(
            f"fewer than half of the requests were answered: {summary.num_completed} of "
            f"{summary.num_requests}"
        )


def label_of(configuration: str | None, options: RunOptions, result: RunResult) -> RunLabel:
    """The label of a measured run. Only a server that tells Sangam's timings is known by them."""
    is_sangam = "prefill" in result.summary.distributions
    return RunLabel.of(
        "measured",
        options.load,
        configuration=configuration,
        model=result.model,
        system="sangam" if is_sangam else None,
    )
