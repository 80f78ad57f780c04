"""One report: every figure that the runs have something for, the tables, and the page.

Decides the order of the figures, their files' names, and that a figure without data is told instead
of drawn. Called by the ``report`` command and by whoever reproduces figures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sangam_loadtest.report import figures
from sangam_loadtest.report.drawn import Drawn, NothingToDraw
from sangam_loadtest.report.page import Section, write_page
from sangam_loadtest.report.passes import Passes
from sangam_loadtest.report.runs import Run
from sangam_loadtest.report.summary_table import summary_table

PAGE_NAME = "report.html"
_Drawing = Callable[[Path], Drawn]


@dataclass(frozen=True, slots=True)
class Report:
    """What was written.

    Attributes:
        drawn: the figures that were drawn.
        missing: the titles of those that were not, with why and what would provide them.
    """

    page: Path
    drawn: tuple[Drawn, ...]
    missing: dict[str, str]


def write_report(
    runs: Sequence[Run],
    folder: Path,
    *,
    passes: Sequence[Passes] = (),
    title: str = "Load tests",
    rates: Sequence[float] = (),
    image_format: str = "png",
) -> Report:
    """Draws what can be drawn into a folder: images, a CSV for each table, ``report.html``.

    The page holds PNGs whatever the format, so that it needs no other file.

    Args:
        rates: for the figures of one rate, see ``grouping.at_one_rate``.
        image_format: ``svg`` and ``pdf`` images are written beside the PNGs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn, missing, sections = [], {}, []
    for name, title_of, draw in _drawings(runs, passes, rates):
        try:
            figure = draw(folder / f"{name}.png")
            if image_format != "png":
                draw(folder / f"{name}.{image_format}")
        except NothingToDraw as reason:
            missing[title_of] = str(reason)
            continue
        figure.table.write_csv(folder / f"{name}.csv")
        drawn.append(figure)
        sections.append(Section.of(figure))
    table = summary_table(runs)
    table.write_csv(folder / "summary.csv")
    page = folder / PAGE_NAME
    write_page(page, title, runs, table, sections, missing)
    return Report(page, tuple(drawn), missing)


def _drawings(
    runs: Sequence[Run], passes: Sequence[Passes], rates: Sequence[float]
) -> list[tuple[str, str, _Drawing]]:
    """File name, title where it is missing, and how it is drawn."""
    return [
        (
            "latency",
            "Latency against request rate",
            lambda path: figures.latency_against_rate(runs, path),
        ),
        (
            "breakdown",
            "Where the time goes",
            lambda path: figures.latency_breakdown(runs, path, rates=rates),
        ),
        (
            "distributions",
            "Queueing and decode time",
            lambda path: figures.queueing_and_decode_cdfs(runs, path, rates=rates),
        ),
        ("tau", "Sweep of the token budget τ", lambda path: figures.tau_sweep(runs, path)),
        (
            "iterations",
            "Iterations against output length",
            lambda path: figures.iterations_against_output(runs, path),
        ),
        (
            "passes",
            "Decode iteration time against batch",
            lambda path: figures.decode_time_against_batch(passes, path),
        ),
    ]
