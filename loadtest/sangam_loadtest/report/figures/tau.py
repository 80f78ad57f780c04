"""The token budget's sweep: mean and P99 latency against rate for each tau, and against tau.

Decides what a sweep is (one configuration of a system on one model and trace, with two budgets
or more) and its layout: a row a sweep, four panels.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.ticker import FixedLocator, NullLocator

from sangam_loadtest.report.axis_cap import mark_handles, mark_notes
from sangam_loadtest.report.drawn import Drawn, NothingToDraw, Table, listed
from sangam_loadtest.report.grouping import Pair, pooled, pooling_notes, tau_name
from sangam_loadtest.report.lines import STATISTICS, draw_lines, latency, lines_of
from sangam_loadtest.report.runs import Run
from sangam_loadtest.report.style import (
    MARKERS,
    Look,
    drawing,
    legend_below,
    look,
    panels,
    save,
)

_PANEL_INCHES = (2.75, 2.5)
_MAX_RATES = 6

Sweep = tuple[Pair, str, str, str]
"""What stays the same in a sweep: facet, configuration, system, kind (empty where unknown)."""


def tau_sweep(runs: Sequence[Run], path: Path) -> Drawn:
    """Draws every sweep of tau among the runs.

    Raises:
        NothingToDraw: no configuration was run with two values of tau.
    """
    sweeps = sweeps_of(runs)
    if not sweeps:
        raise NothingToDraw(
            "No configuration was run with two token budgets. Run one configuration at the same "
            "rates with several values of tau (label.tau_tokens in a run's summary)."
        )
    swept = [run for found in sweeps.values() for run in found]
    taus = sorted({_tau(run) for run in swept})
    looks = {tau: look(place) for place, tau in enumerate(taus)}
    is_any_beyond = False
    with drawing():
        figure, grid = panels(len(sweeps), 4, _PANEL_INCHES)
        for row, (sweep, found) in zip(grid, sweeps.items(), strict=True):
            for axes, statistic in zip(row[:2], STATISTICS, strict=True):
                lines = lines_of(found, statistic, _tau, _rate)
                is_any_beyond |= draw_lines(axes, lines, looks)
                axes.set_xlabel("request rate (requests/s)")
                axes.set_ylabel(f"{statistic} latency (s)")
            is_any_beyond |= _draw_against_tau(row[2:], found)
            row[0].set_title(sweep_name(sweep), loc="left")
        is_any_saturated = any(run.saturation for run in swept)
        handles = [looks[tau].handle(tau_name(tau)) for tau in taus]
        legend_below(figure, handles + mark_handles(is_any_saturated, is_any_beyond))
        save(figure, path)
    names = "; ".join(sweep_name(sweep) for sweep in sweeps)
    return Drawn(
        path,
        "Sweep of the token budget τ",
        "Mean and P99 latency against request rate for each token budget τ of an iteration (left), "
        "and the same runs against τ for each rate (right).",
        f"Lines of mean and P99 latency for {listed([tau_name(tau) for tau in taus])}; {names}. "
        "The table below has every point.",
        _table(sweeps),
        pooling_notes([run for run in runs if run.label.tau_tokens is not None])
        + mark_notes(is_any_saturated, is_any_beyond),
    )


def sweeps_of(runs: Sequence[Run]) -> dict[Sweep, list[Run]]:
    """The runs of each sweep, those without tau, rate or answers left out."""
    found: dict[Sweep, list[Run]] = defaultdict(list)
    for run in pooled(runs):
        label = run.label
        if label.tau_tokens and label.rate is not None and len(run.latency_seconds):
            parts = (label.configuration or "", label.system or "", label.kind or "")
            found[(Pair.of(run), *parts)].append(run)
    return {sweep: of for sweep, of in found.items() if len({_tau(run) for run in of}) > 1}


def sweep_name(sweep: Sweep) -> str:
    """A sweep as its row is headed."""
    return ", ".join(str(part) for part in sweep if part)


def _tau(run: Run) -> float:
    assert run.label.tau_tokens is not None  # sweeps_of leaves others out
    return run.label.tau_tokens


def _rate(run: Run) -> float:
    assert run.label.rate is not None
    return run.label.rate


def _draw_against_tau(row: Sequence[Axes], runs: Sequence[Run]) -> bool:
    """Draws a line for each of at most six rates that several budgets were run at."""
    budgets: dict[float, set[float]] = defaultdict(set)
    for run in runs:
        budgets[_rate(run)].add(_tau(run))
    rates = sorted(rate for rate, found in budgets.items() if len(found) > 1)
    if len(rates) > _MAX_RATES:
        places = np.linspace(0, len(rates) - 1, _MAX_RATES).round().astype(int)
        rates = [rates[place] for place in places]
    if not rates:
        for axes in row:
            axes.set_axis_off()
        return False
    looks = _rate_looks(rates)
    is_any_beyond = False
    shown = [run for run in runs if _rate(run) in looks]
    for axes, statistic in zip(row, STATISTICS, strict=True):
        axes.set_xscale("log", base=2)
        is_any_beyond |= draw_lines(axes, lines_of(shown, statistic, _rate, _tau), looks)
        taus = sorted({_tau(run) for run in shown})
        axes.xaxis.set_major_locator(FixedLocator(taus))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([_short(tau) for tau in taus])
        axes.set_xlabel("τ (tokens; k = 1,024)")
        axes.set_ylabel(f"{statistic} latency (s)")
    handles = [looks[rate].handle(f"{rate:g}") for rate in rates]
    row[-1].legend(
        handles=handles, title="requests/s", loc="center left", bbox_to_anchor=(1.02, 0.5)
    )
    return is_any_beyond


def _short(tau_tokens: float) -> str:
    return f"{tau_tokens / 1024:g}k" if tau_tokens % 1024 == 0 else f"{tau_tokens:g}"


def _rate_looks(rates: Sequence[float]) -> dict[float, Look]:
    """Rates are in order, so their colours are: from light to dark (viridis)."""
    shades = np.linspace(0.8, 0.0, len(rates)) if len(rates) > 1 else [0.0]
    return {
        rate: Look(to_hex(colormaps["viridis"](shade)), MARKERS[-1 - place % len(MARKERS)], "-")
        for place, (rate, shade) in enumerate(zip(rates, shades, strict=True))
    }


def _table(sweeps: Mapping[Sweep, Sequence[Run]]) -> Table:
    rows = [
        (
            sweep_name(sweep),
            _tau(run),
            _rate(run),
            latency(run, "mean"),
            latency(run, "P99"),
            run.saturation or "no",
        )
        for sweep, runs in sweeps.items()
        for run in sorted(runs, key=lambda run: (_rate(run), _tau(run)))
    ]
    columns = ("sweep", "τ (tokens)", "requests/s", "mean (s)", "P99 (s)", "saturated")
    return Table(columns, tuple(rows))
