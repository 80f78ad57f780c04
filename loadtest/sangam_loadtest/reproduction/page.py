"""Writes the page: assumptions, the table of claims, figures, both systems, policies.

Decides the page's order; what it says of the numbers comes from ``claims`` and ``tables``, the
words are in ``page.md.j2``. Called by ``__main__``.
"""

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from sangam_loadtest.report.drawn import Drawn, Table
from sangam_loadtest.reproduction.claims import HOLDS, MEAN_BOUNDS, Finding, findings
from sangam_loadtest.reproduction.pictures import draw
from sangam_loadtest.reproduction.runner import Results
from sangam_loadtest.reproduction.studies import (
    BUDGET_PAIRS,
    PAIRS,
    POLICY_RATES,
    reference_labels,
)
from sangam_loadtest.reproduction.tables import (
    both_systems,
    every_run,
    fp8,
    hybrid_budgets,
    other_commits,
    policies,
    repeated,
    saturation,
    thresholds,
    winners,
)
from sangam_loadtest.simulator.commits import DEFAULT_COMMITS

PAGE = "README.md"
_OF_THEIR_OWN = ("ratios-cdf", "decode-time", "iterations")


@dataclass(frozen=True, slots=True)
class Winner:
    """A policy, and at how many points it is better than the best of the references."""

    label: str
    num_means: int
    num_tails: int


def write_page(results: Results, folder: Path) -> None:
    """Write page, figures and numbers into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw(results, folder)
    for figure in (figure for of in drawn.values() for figure in of if _has_own_numbers(figure)):
        figure.table.write_csv(figure.path.with_suffix(".csv"))
    claims = findings(results)
    every_run(results).write_csv(folder / "runs.csv")
    text = resources.files(__package__).joinpath("page.md.j2").read_text("utf-8")
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    page = environment.from_string(text).render(
        claims=_claims_table(claims).to_markdown(),
        num_holding=sum(finding.verdict.startswith(HOLDS) for finding in claims),
        num_claims=len(claims),
        figures={section: [_figure(figure) for figure in of] for section, of in drawn.items()},
        systems=both_systems(results).to_markdown(),
        fp8=fp8(results).to_markdown(),
        policies={f"{pair[0]}, {pair[1]}": policies(results, pair).to_markdown() for pair in PAIRS},
        saturation=saturation(results).to_markdown(),
        thresholds=thresholds(results).to_markdown(),
        budgets={
            f"{pair[0]}, {pair[1]}": hybrid_budgets(results, pair).to_markdown()
            for pair in BUDGET_PAIRS
        },
        repeated=repeated(results).to_markdown(),
        other_commits=other_commits(results).to_markdown(),
        winners=[Winner(*row) for row in winners(results, reference_labels())],
        num_points=sum(map(len, POLICY_RATES.values())),
        num_trials=len({trial.digest for trial in results}),
        commits=DEFAULT_COMMITS,
        bounds={f"{model}, {trace}": bound for (model, trace), bound in MEAN_BOUNDS.items()},
    )
    (folder / PAGE).write_text(page, encoding="utf-8")


def _claims_table(claims: list[Finding]) -> Table:
    return Table(
        ("section", "claim", "paper", "here", "verdict"),
        tuple((c.section, c.claim, c.paper, c.ours, c.verdict) for c in claims),
    )


def _has_own_numbers(figure: Drawn) -> bool:
    """Whether a figure shows what is in no run's line of runs.csv: distributions, pass times."""
    return figure.path.stem in _OF_THEIR_OWN


def _figure(figure: Drawn) -> str:
    notes = " ".join(figure.notes)
    said = f"*{figure.caption} {notes}*".replace(" *", "*")
    # The report's own page has a table under each figure; this one has all numbers in files.
    file = f"{figure.path.stem}.csv" if _has_own_numbers(figure) else "runs.csv"
    alt = re.sub(r" The table below has [^.]*\.$", f" The numbers are in {file}.", figure.alt)
    return f"![{alt}]({figure.path.name})\n\n{said.replace('the table has', f'{file} has')}"
