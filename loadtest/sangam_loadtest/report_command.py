"""``sangam loadtest report``: options, and which files they mean. The work is ``report``'s."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sangam_core.counted import counted
from sangam_core.errors import ConfigurationError
from sangam_router.command_errors import errors_told

if TYPE_CHECKING:
    from sangam_loadtest.report.build import Report

_FORMATS = ("png", "svg", "pdf")


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Records of runs (.jsonl), or folders of them, with the summaries beside them.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="Folder for the page, the images and the tables.")
    ] = Path(".sangam/loadtest/report"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Load tests",
    rate: Annotated[
        list[float] | None,
        typer.Option(
            min=0.000001,
            help="Requests a second of the figures of one rate (breakdown, distributions); give it "
            "several times where models and traces have different ones. (Default: the highest at "
            "which half of the configurations are not saturated.)",
            show_default=False,
        ),
    ] = None,
    passes: Annotated[
        list[Path] | None,
        typer.Option(
            help="Passes of an engine (.csv); several times for several. (Default: the "
            "NAME.passes.csv beside the runs.)",
            show_default=False,
        ),
    ] = None,
    image_format: Annotated[
        str, typer.Option("--format", help="png, or svg or pdf beside it.")
    ] = "png",
) -> None:
    """Draw the paper's figures from runs, measured or simulated, and compare them on one page."""
    console = Console(highlight=False)
    with errors_told():
        if image_format not in _FORMATS:
            raise ConfigurationError(
                f"--format {image_format}: must be one of {', '.join(_FORMATS)}"
            )
        # Here, since matplotlib takes most of a second to import, which no other command should pay
        from sangam_loadtest.report.build import write_report
        from sangam_loadtest.report.loading import load_runs, passes_beside, record_files
        from sangam_loadtest.report.passes import load_passes

        files = record_files(runs)
        with console.status(f"reading {counted(len(files), 'file')} of records, drawing"):
            beside = () if passes else passes_beside(files)
            report = write_report(
                load_runs(files),
                output,
                passes=load_passes(passes or beside, is_pooled=not passes),
                title=title,
                rates=rate or (),
                image_format=image_format,
            )
        _tell(report, console)


def _tell(report: "Report", console: Console) -> None:
    for figure in report.drawn:
        console.print(f"{figure.path}: {figure.title}", soft_wrap=True)
    for name, reason in report.missing.items():
        console.print(f"not drawn: {name}: {reason}", style="yellow", soft_wrap=True)
    console.print(f"page: {report.page}", soft_wrap=True)
