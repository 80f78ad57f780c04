"""``sangam loadtest fit``: options, the table that is written, and how well it fits.

What is fitted, and how, is decided in ``costs``.
"""

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as Shown
from rich.text import Text

from sangam_core.errors import SangamError
from sangam_loadtest.costs.accuracy import OperatorErrors, errors_by_operator, held_out, in_sample
from sangam_loadtest.costs.fit import Fit, fit
from sangam_loadtest.costs.measurements import (
    Measurements,
    read_fp8_passes,
    read_passes,
    read_products,
)
from sangam_loadtest.costs.operators import FP8
from sangam_loadtest.costs.table import BACKENDS, read_table
from sangam_loadtest.costs.table_file import Entry, write_table
from sangam_router.command_errors import errors_told

_NUM_FOLDS = 4


def fit_command(
    passes: Annotated[
        list[Path],
        typer.Argument(help="CSV of whole passes: of make bench-passes, or of a profile."),
    ],
    gpu: Annotated[
        str,
        typer.Option(
            help="What they were measured on: h100 or h200 (factors over its ceilings are "
            "fitted), or a new name such as cpu (its rates are).",
        ),
    ] = "cpu",
    products: Annotated[
        Path | None, typer.Option(help="CSV of matrix products alone, by rows.")
    ] = None,
    fp8: Annotated[Path | None, typer.Option(help="CSV of passes with FP8 products.")] = None,
    output: Annotated[Path, typer.Option(help="The table, for --constants of simulate.")] = Path(
        ".sangam/loadtest/constants.toml"
    ),
    hold_out: Annotated[
        bool, typer.Option(help="Also fit without a quarter of the lines, four times.")
    ] = True,
) -> None:
    """Fit the cost model's constants to measured passes and write them as a table."""
    console = Console(highlight=False)
    with errors_told():
        measured = _measurements(passes, products, fp8)
        table = read_table()
        found = fit(measured, table, gpu)
        sources = [path.name for path in (*passes, products, fp8) if path is not None]
        write_fit(output, found, ", ".join(sources))
        others, warnings = None, list(found.warnings)
        if hold_out:
            try:
                others = errors_by_operator(held_out(measured, table, gpu, _NUM_FOLDS))
            except SangamError as error:
                warnings.append(f"no line could be held out: {error}")
        console.print(_shown(errors_by_operator(in_sample(measured, found)), others))
        for warning in warnings:
            console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
        console.print(f"constants: {output}", soft_wrap=True)


def write_fit(path: Path, found: Fit, measured: str) -> None:
    """Write all that a fit found, with the spread of each constant.

    Args:
        measured: names of the files that it comes from.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    entries = [
        Entry(
            section,
            name,
            constants := getattr(found.table, section)[name],
            {} if section == BACKENDS else _sources(found, section, name, constants),
        )
        for section, name in found.entries
    ]
    heading = (
        f"Constants of the cost model on {found.gpu}, fitted to {measured}\n"
        "by sangam loadtest fit. What is not here is as in the table that comes with Sangam."
    )
    write_table(path, heading, entries)


def _sources(found: Fit, section: str, name: str, constants: object) -> dict[str, str]:
    sources = {}
    for item in fields(constants):  # type: ignore[arg-type]
        spread = found.spreads.get(f"{section}.{name}.{item.name}")
        if spread is None:
            sources[item.name] = "set, not fitted"
        elif spread == 0:
            sources[item.name] = "fit: at its bound"
        else:
            sources[item.name] = f"fit, +- {spread:.1%}"
    return sources


def _measurements(passes: list[Path], products: Path | None, fp8: Path | None) -> Measurements:
    lines = [line for path in passes for line in read_passes(path)]
    if fp8 is not None:
        # The other half repeats, for comparison, what the files of passes hold.
        lines += [line for line in read_fp8_passes(fp8) if line.quantization == FP8]
    return Measurements(tuple(lines), () if products is None else read_products(products))


def _shown(fitted: list[OperatorErrors], others: list[OperatorErrors] | None) -> Shown:
    held = {item.operator: item for item in others or []}
    columns = ["error", "lines", "median", "worst", "worst of the pass"]
    if others is not None:
        columns += ["held out: median", "worst", "worst of the pass"]
    shown = Shown(*columns, "worst line", box=None, padding=(0, 1))
    for column in shown.columns[1:-1]:
        column.justify = "right"
    for item in fitted:
        cells = [item.operator, str(item.num_lines), *_cells(item)]
        if others is not None:
            cells += _cells(held[item.operator]) if item.operator in held else [""] * 3
        shown.add_row(*cells, item.worst_label)
    return shown


def _cells(item: OperatorErrors) -> list[str]:
    return [f"{value:.1%}" for value in (item.median, item.worst, item.worst_of_pass)]
