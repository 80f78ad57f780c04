"""The search for the best deployment: splits first, then settings, then how much the best can take.

Decides the stages and who passes them. A stage is successive halving by the worst slack over the
objectives, at the rate asked for or a higher one that tells candidates apart; finalists are judged
by the highest rate at which the objectives hold. Everything follows from the seed, whatever the
number of processes. Called by the command.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil, log2

from sangam_core.counted import counted
from sangam_loadtest.capacity import Capacity, ProbeResult, Search, find_capacity, judge
from sangam_loadtest.recommend.candidates import Candidate, Choices, Mode, neighbours
from sangam_loadtest.recommend.halving import halved, kept, lasts, next_rate, ranked, tells
from sangam_loadtest.recommend.trials import Job, Trial
from sangam_loadtest.recommend.workers import SimulationProcesses
from sangam_loadtest.summary import Summary

_RUNGS = (8, 4, 2, 1)  # a full run divided by each
_MIN_REQUESTS = 30
_RATE_RANGE = 16.0
_MAX_SPLIT_ROUNDS = 6
_LONGER = (1, 2, 4, 8)  # times a full run, for what holds in a run too short to tell


@dataclass(frozen=True, slots=True)
class Effort:
    """How thorough a search is.

    Attributes:
        num_requests: of a full run, which finalists are judged by.
        num_splits: of hybrids and of static disaggregation whose settings are tried.
        num_finalists: whose capacity is looked for, besides the best of each mode.
        tolerance: relative, of a capacity.
        lower_rates: shares of the rate asked for that the figure shows as well.
    """

    num_requests: int
    num_splits: int = 2
    num_finalists: int = 2
    tolerance: float = 0.05
    lower_rates: tuple[float, ...] = (0.5, 0.75)

    @property
    def lengths(self) -> list[int]:
        """Requests of each rung of a halving, rising to a full run."""
        least = min(_MIN_REQUESTS, self.num_requests)
        return [max(least, ceil(self.num_requests / part)) for part in _RUNGS]


@dataclass(frozen=True, slots=True)
class Finalist:
    """A candidate that was judged in full.

    Attributes:
        trial: a full run at the rate asked for, with its records.
        curve: full runs at other rates and this one, by rate.
    """

    trial: Trial
    capacity: Capacity
    curve: tuple[Trial, ...]

    @property
    def candidate(self) -> Candidate:
        """What was judged."""
        return self.trial.candidate

    @property
    def margin(self) -> float | None:
        """Share of the rate asked for by which the capacity is above it (below: negative); None
        where not even the lowest rate probed held."""
        held = self.capacity.highest_held
        return None if held is None else held / self.trial.job.rate - 1

    @property
    def holds(self) -> bool:
        """Whether the objectives hold up to the rate asked for."""
        return self.margin is not None and self.margin >= 0


@dataclass(frozen=True, slots=True)
class Stage:
    """What comes next, for whoever watches."""

    title: str
    num_trials: int


OnStage = Callable[[Stage], None]


class DeploymentSearch:
    """One search. What was found so far can be asked for at any time.

    Args:
        is_split_free: splits between those of ``choices`` may be tried as well.
    """

    def __init__(
        self,
        processes: SimulationProcesses,
        choices: Choices,
        effort: Effort,
        on_stage: OnStage = lambda stage: None,
        on_trial: Callable[[Trial], None] = lambda trial: None,
        *,
        is_split_free: bool = False,
    ) -> None:
        self._processes, self._choices, self._effort = processes, choices, effort
        self._scenario = scenario = processes.scenario
        self._on_stage, self._on_trial = on_stage, on_trial
        self._is_split_free = is_split_free
        self._trials: dict[Job, Trial] = {}
        rate = scenario.load.arrivals.rate
        assert rate is not None  # the command asks for one
        self._rate = self._race_rate = rate
        self._leading: Trial | None = None

    @property
    def trials(self) -> list[Trial]:
        """All that was run so far."""
        return list(self._trials.values())

    def worth(self, trial: Trial) -> float:
        """The worst slack over the objectives."""
        return trial.slack(self._scenario.objectives)

    def best_so_far(self) -> Trial | None:
        """The best of the last stage that has ended; before that, of what was run."""
        order = ranked(self.trials, self.worth)
        return self._leading or (order[0] if order else None)

    def run(self) -> list[Finalist]:
        """Every finalist, the best first: the highest capacity, then the most slack.

        Raises:
            SangamError: the trace or the model cannot be simulated.
        """
        # Before any process starts: what is wrong with the trace is told at once.
        self._scenario.plan(self._rate, self._effort.num_requests)
        settings = self._best_settings(self._best_splits())
        finalists = [t.candidate for t in kept(settings, self.worth, self._effort.num_finalists)]
        self._on_stage(Stage("finalists at the rate asked for", len(finalists)))
        asked = self._measure(finalists, self._rate, self._effort.num_requests, is_final=True)
        self._on_stage(Stage("how much they can take", self._num_probes(len(finalists))))
        judged = self._judged(asked)
        order = sorted(judged, key=lambda finalist: (-_held(finalist), -self.worth(finalist.trial)))
        return self._with_curves(order)

    def holding_on(self, candidates: Sequence[Candidate]) -> Trial | None:
        """The best of the candidates that hold the objectives in a full run at the rate."""
        self._on_stage(Stage(counted(candidates[0].num_gpus, "GPU"), len(candidates)))
        trials = self._measure(candidates, self._rate, self._effort.num_requests)
        order = ranked(trials, self.worth)
        return next((t for t in order if t.holds(self._scenario.objectives)), None)

    # -- stages -------------------------------------------------------------------------------

    def _best_splits(self) -> list[Candidate]:
        """The best candidate of each split that goes on, settings still coarse."""
        first, second = self._effort.lengths[:2]
        coarse = self._choices.coarse()
        if len(coarse) == 1:
            return coarse
        trials = self._raced("splits", coarse, first)
        half = kept(trials, self.worth, -(-len(trials) // 2))
        trials = self._raced("splits", [trial.candidate for trial in half], second)
        trials = ranked(trials, self.worth)
        if self._is_split_free:
            trials = self._between(trials)
        found: list[Candidate] = []
        for mode in Mode:
            by_split: dict[str, Candidate] = {}
            for trial in trials:
                if trial.candidate.mode is mode:
                    by_split.setdefault(trial.candidate.split, trial.candidate)
            found += list(by_split.values())[: self._effort.num_splits]
        return found

    def _between(self, trials: list[Trial]) -> list[Trial]:
        """With splits between the best and its neighbours, as long as there are any."""
        tried = [trial.candidate.split for trial in self.trials]
        rate, length = trials[0].job.rate, trials[0].job.num_requests
        for _ in range(_MAX_SPLIT_ROUNDS):
            new: list[Candidate] = []
            for mode in (Mode.HYBRID, Mode.DISAGGREGATED):
                best = next((t.candidate for t in trials if t.candidate.mode is mode), None)
                if best is not None:
                    new += [replace(best, split=s) for s in neighbours(best.split, tried)]
            if not new:
                break
            tried += [candidate.split for candidate in new]
            self._on_stage(Stage("splits between them", len(new)))
            trials = ranked([*trials, *self._measure(new, rate, length)], self.worth)
        return trials

    def _best_settings(self, splits: Sequence[Candidate]) -> list[Trial]:
        """Full runs of the best settings of these splits, the best first."""
        pool: list[Candidate] = []
        for best in splits:
            # What decided between the splits is decided; tau, theta and placement are open.
            narrow = replace(self._choices, prefill_taus=(best.policy.tau_prefill,))
            pool += narrow.of_split(best.split)

        def measure(candidates: Sequence[Candidate], length: int) -> list[Trial]:
            return self._raced("settings", candidates, length)

        lengths = self._effort.lengths
        return halved(pool, lengths, measure, self.worth, self._effort.num_finalists)

    def _raced(self, title: str, candidates: Sequence[Candidate], length: int) -> list[Trial]:
        """Trials at the rate that tells them apart, as the stage before this one found it."""
        rate, before = self._race_rate, self._leading
        if before is not None and rate > before.job.rate and not tells(before, length, rate):
            rate = before.job.rate
        told = f"{title}: runs of {counted(length, 'request')} at {rate:.4g}/s"
        self._on_stage(Stage(told, len(candidates)))
        trials = self._measure(candidates, rate, length)
        self._leading = ranked(trials, self.worth)[0]
        worths = [self.worth(t) if t.growth is None else min(self.worth(t), 0.0) for t in trials]
        self._race_rate = next_rate(rate, self._rate, worths)
        return trials

    def _measure(
        self, candidates: Sequence[Candidate], rate: float, length: int, *, is_final: bool = False
    ) -> list[Trial]:
        jobs = [Job(candidate, rate, length, is_final) for candidate in candidates]
        self._run([job for job in dict.fromkeys(jobs) if job not in self._trials])
        return [self._trials[job] for job in jobs]

    def _run(self, jobs: Sequence[Job]) -> None:
        for trial in self._processes.run_all(jobs):
            self._took(trial)

    def _took(self, trial: Trial) -> None:
        self._trials[trial.job] = trial
        self._on_trial(trial)

    # -- finalists ----------------------------------------------------------------------------

    def _num_probes(self, num_finalists: int) -> int:
        """About how many runs their capacities take."""
        return num_finalists * (1 + ceil(log2(1 / self._effort.tolerance)))

    def _judged(self, finalists: Sequence[Trial]) -> list[Finalist]:
        if self._processes.num_jobs == 1:
            return [self._judge(trial) for trial in finalists]
        with ThreadPoolExecutor(len(finalists)) as threads:
            futures = [threads.submit(self._judge, trial) for trial in finalists]
            try:
                return [future.result() for future in futures]
            except BaseException:
                # Else the threads would be waited for, and they wait for the processes.
                self._processes.kill()
                raise

    def _judge(self, trial: Trial) -> Finalist:
        full, candidate = self._effort.num_requests, trial.candidate
        search = Search(
            self._scenario.objectives,
            start_rate=self._rate,
            min_rate=self._rate / _RATE_RANGE,
            max_rate=self._rate * _RATE_RANGE,
            tolerance=self._effort.tolerance,
        )
        known = [
            _verdict(search, made)
            for made in self._full_runs(candidate)
            if lasts(made) or not made.holds(search.objectives)
        ]
        probed: dict[float, Trial] = {}

        def probe(rate: float) -> Summary:
            for factor in _LONGER:
                found = self._processes.run(Job(candidate, rate, full * factor))
                self._took(found)
                if lasts(found) or not found.holds(search.objectives):
                    break
            probed[rate] = found
            return found.summary

        found = find_capacity(
            search, probe, known, verdict=lambda search, rate, _: _verdict(search, probed[rate])
        )
        return Finalist(trial, found, ())

    def _with_curves(self, finalists: Sequence[Finalist]) -> list[Finalist]:
        """The best of each mode with lower rates, for the figure."""
        shown = best_of_modes(finalists)
        jobs = [
            Job(finalist.candidate, self._rate * share, self._effort.num_requests)
            for finalist in shown
            for share in self._effort.lower_rates
        ]
        missing = [job for job in jobs if job not in self._trials]
        if missing:
            self._on_stage(Stage("lower rates", len(missing)))
            self._run(missing)
        return [
            replace(finalist, curve=tuple(self._full_runs(finalist.candidate)))
            for finalist in finalists
        ]

    def _full_runs(self, candidate: Candidate) -> list[Trial]:
        """The longest run of a candidate at each rate, a full one or longer, by rate."""
        by_rate: dict[float, Trial] = {}
        for trial in sorted(self.trials, key=lambda trial: trial.job.num_requests):
            job = trial.job
            if job.candidate == candidate and job.num_requests >= self._effort.num_requests:
                by_rate[job.rate] = trial
        return [by_rate[rate] for rate in sorted(by_rate)]


def _verdict(search: Search, trial: Trial) -> ProbeResult:
    """A probe's result: a queue that grows holds no objective for long."""
    result = judge(search, trial.job.rate, trial.summary)
    if trial.growth is None:
        return result
    return replace(result, violations=[*result.violations, trial.growth])


def _held(finalist: Finalist) -> float:
    return finalist.capacity.highest_held or 0.0


def best_of_modes(finalists: Sequence[Finalist]) -> list[Finalist]:
    """The first of each mode, in their order."""
    found: dict[Mode, Finalist] = {}
    for finalist in finalists:
        found.setdefault(finalist.candidate.mode, finalist)
    return list(found.values())
