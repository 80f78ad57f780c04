"""Which runs belong together in a figure, and what a line is called.

Decides: a facet is a pair of model and trace; a series is what differs between the lines of a facet
(the configuration; with it the system, tau and kind where those differ among the runs); runs with
the same label are repeats, whose requests are pooled. Pure; called by the figures.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sangam_loadtest.report.drawn import listed
from sangam_loadtest.report.runs import NUMBERS, RequestNumbers, Run

_KNOWN_NAMES = {
    "llada-8b": "LLaDA-8B",
    "dream-7b": "Dream-7B",
    "sharegpt": "ShareGPT",
    "arxiv": "arXiv",
}
_CONFIGURATION = re.compile(r"(?:(\d+)P)?(\d+)([CD])\b")
UNNAMED = "unnamed"


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """A facet: the model and the trace of its runs."""

    model: str
    trace: str

    @classmethod
    def of(cls, run: Run) -> "Pair":
        """The facet of a run."""
        return cls(
            shown(run.label.model) or "unknown model", shown(run.label.trace) or "unknown trace"
        )

    def __str__(self) -> str:
        return f"{self.model}, {self.trace}"


def shown(name: str | None) -> str | None:
    """A model or trace as the paper writes it."""
    return None if name is None else _KNOWN_NAMES.get(name.lower(), name)


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a facet: what it is called in parts, and whole."""

    configuration: str
    variant: str

    @property
    def name(self) -> str:
        """As the legend has it."""
        return ", ".join(part for part in (self.configuration, self.variant) if part)


class SeriesOf:
    """Names the series of runs, saying of each only what differs among all runs given."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._has_systems = len({run.label.system for run in runs}) > 1
        self._has_kinds = len({run.label.kind for run in runs}) > 1
        taus: dict[tuple[Pair, object], set[int | None]] = defaultdict(set)
        for run in runs:
            taus[Pair.of(run), _deployment(run)].add(run.label.tau_tokens)
        self._swept = {deployment for (_, deployment), found in taus.items() if len(found) > 1}
        found_series = {self(run) for run in runs}
        self.all = sorted(
            found_series, key=lambda s: (configuration_order(s.configuration), natural(s.variant))
        )

    def __call__(self, run: Run) -> Series:
        """The series of one of the runs."""
        label, parts = run.label, []
        if self._has_systems:
            parts.append(label.system or "unknown system")
        if _deployment(run) in self._swept:
            parts.append(tau_name(label.tau_tokens))
        if self._has_kinds:
            parts.append(label.kind or "unknown kind")
        return Series(label.configuration or UNNAMED, ", ".join(parts))

    def place(self, run: Run) -> int:
        """Where the series of a run comes in the order of all."""
        return self.all.index(self(run))


def tau_name(tau_tokens: float | None) -> str:
    """A token budget in a legend."""
    return "τ unknown" if tau_tokens is None else f"τ = {tau_tokens:g}"


def _deployment(run: Run) -> object:
    """What a sweep of tau keeps. Swept in one facet, it is called by its tau in all of them."""
    return (run.label.configuration, run.label.system, run.label.kind)


def natural(name: str) -> tuple[tuple[int, float, str], ...]:
    """A key that sorts numbers in names by value."""
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return tuple((0, float(p), "") if n % 2 else (1, 0.0, p) for n, p in enumerate(parts))


def configuration_order(name: str) -> tuple[object, ...]:
    """A key for the paper's order: colocated, hybrid, disaggregated; then by name."""
    found = _CONFIGURATION.search(name)
    rank = 3
    if found:
        rank = 2 if found[3] == "D" else 1 if found[1] else 0
    return (rank, natural(name))


def by_pair(runs: Iterable[Run]) -> dict[Pair, list[Run]]:
    """Runs by facet, by model, then by trace: the paper's in its order, others as first seen."""
    found: dict[Pair, list[Run]] = defaultdict(list)
    for run in runs:
        found[Pair.of(run)].append(run)
    models = [*_KNOWN_NAMES.values(), *(pair.model for pair in found)]
    traces = [*_KNOWN_NAMES.values(), *(pair.trace for pair in found)]
    order = sorted(found, key=lambda pair: (models.index(pair.model), traces.index(pair.trace)))
    return {pair: found[pair] for pair in order}


def pooled(runs: Sequence[Run]) -> list[Run]:
    """Runs with repeats made one: those whose labels are the same in everything."""
    groups: dict[object, list[Run]] = defaultdict(list)
    for run in runs:
        groups[_identity(run)].append(run)
    return [_one_of(group) for group in groups.values()]


def _identity(run: Run) -> object:
    """What repeats have in common: the label, with names as they are shown."""
    return (Pair.of(run), replace(run.label, model=None, trace=None))


def _one_of(group: Sequence[Run]) -> Run:
    if len(group) == 1:
        return group[0]
    records = [run.records for run in group]
    # Repeats each start at 0: a trend over due times still means what it says
    order = np.argsort(
        np.concatenate([r.columns["scheduled_seconds"] for r in records]), kind="stable"
    )
    joined = RequestNumbers(
        {name: np.concatenate([r.columns[name] for r in records])[order] for name in NUMBERS},
        np.concatenate([r.is_answered for r in records])[order],
        sum(r.num_warmup for r in records),
        sum(r.num_interrupted for r in records),
    )
    return replace(
        group[0], records=joined, summary={}, source=listed([run.source for run in group])
    )


def pooling_notes(runs: Sequence[Run]) -> tuple[str, ...]:
    """Says so where repeats are pooled."""
    num_repeats = len(runs) - len({_identity(run) for run in runs})
    if not num_repeats:
        return ()
    return (f"Runs with the label of another one, pooled with it: {num_repeats}.",)


def at_one_rate(
    runs: Sequence[Run], rates: Sequence[float] = ()
) -> tuple[dict[Pair, list[Run]], tuple[str, ...]]:
    """For each facet its runs at one rate, and what to say of facets that have none.

    The rate is the first of ``rates`` that the facet has; without ``rates``, of those that most of
    its series have, the highest at which at least half of the runs are not saturated (if
    there is none, the lowest).
    """
    chosen: dict[Pair, list[Run]] = {}
    notes: list[str] = []
    for pair, found in by_pair(pooled(runs)).items():
        at: dict[float, list[Run]] = defaultdict(list)
        for run in found:
            if run.label.rate is not None:
                at[run.label.rate].append(run)
        rate = _given(rates, list(at)) if rates else _telling(at)
        if rate is not None:
            chosen[pair] = at[rate]
        else:
            has = listed([f"{r:g}" for r in sorted(at)]) or "none that is known"
            notes.append(f"{pair}: no run at the rate asked for; its rates: {has}.")
    return chosen, tuple(notes)


def _given(rates: Sequence[float], there: Sequence[float]) -> float | None:
    for rate in rates:
        for found in there:
            if abs(found - rate) <= 0.005 * rate:
                return found
    return None


def _telling(at: dict[float, list[Run]]) -> float | None:
    if not at:
        return None
    most = max(len(found) for found in at.values())
    full = sorted(rate for rate, found in at.items() if len(found) == most)
    steady = [rate for rate in full if 2 * sum(run.saturation is None for run in at[rate]) >= most]
    return steady[-1] if steady else full[0]
