"""``make reproduce``: runs every trial and writes the page, the figures and the numbers."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sangam_loadtest.reproduction.page import write_page
from sangam_loadtest.reproduction.runner import run_trials
from sangam_loadtest.reproduction.studies import every_trial
from sangam_router.command_errors import errors_told

_INTERRUPTED_STATUS = 130


def reproduce(
    output: Annotated[Path, typer.Option(help="Folder of the page and the figures.")] = Path(
        "loadtest/reproduction"
    ),
    work: Annotated[
        Path, typer.Option(help="Folder of the records; what is there is not run again.")
    ] = Path(".sangam/reproduction"),
) -> None:
    """Simulate the paper's evaluation and this system's beside it, and tell how they came out."""
    console = Console(highlight=False)
    with errors_told():
        trials = list(every_trial())
        distinct = len({trial.digest for trial in trials})
        console.print(
            f"{distinct} simulations ({len(trials)} trials, some of two studies); an interrupted "
            f"run goes on from the records in {work}",
            soft_wrap=True,
        )
        try:
            results = run_trials(trials, work, console)
        except KeyboardInterrupt:
            console.print(f"stopped; what is done is kept in {work}", soft_wrap=True)
            raise typer.Exit(_INTERRUPTED_STATUS) from None
        write_page(results, output)
        console.print(f"page: {output / 'README.md'}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(reproduce)
