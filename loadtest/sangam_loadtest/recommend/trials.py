"""One simulated run of a candidate, and how far it is from the objectives.

Decides what is the same for all candidates (the same requests at the same times, and the same
commits, so that they differ by their own doing) and what a run is worth. Called by ``workers``,
which runs trials in processes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sangam_loadtest.capacity import Objective
from sangam_loadtest.costs.model import CostModel
from sangam_loadtest.load import Due, Load, planned
from sangam_loadtest.recommend.candidates import Candidate
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.report.runs import run_of
from sangam_loadtest.run_files import RunLabel
from sangam_loadtest.simulator.commits import CommitCounts
from sangam_loadtest.simulator.simulate import Simulation, simulate
from sangam_loadtest.simulator.system import Split
from sangam_loadtest.summary import Summary, summarise
from sangam_loadtest.system_options import CostOptions
from sangam_loadtest.traces.request import TraceRequest
from sangam_loadtest.traces.source import TraceSpec, take_requests

MIN_JUDGED = 300
"""Requests of a run whose growth is judged: its means over 70 requests vary by some 10 %."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run to make.

    Attributes:
        num_requests: counted ones, without the warm-up.
        keeps_records: the trial has them; they are large.
    """

    candidate: Candidate
    rate: float
    num_requests: int
    keeps_records: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """A run that was made.

    Attributes:
        growth: how latency still grew after the first third, in which an empty system fills up;
            None where it did not, or where so short a run would not tell (``MIN_JUDGED``).
        busy_shares: mean over the workers of each role, by the role's letter.
    """

    job: Job
    summary: Summary
    growth: str | None
    busy_shares: dict[str, float]
    records: tuple[RequestRecord, ...] = ()

    @property
    def candidate(self) -> Candidate:
        """What was run."""
        return self.job.candidate

    def values(self, objectives: Sequence[Objective]) -> list[float | None]:
        """What each objective bounds, seconds."""
        return [objective.value(self.summary.distributions) for objective in objectives]

    def slack(self, objectives: Sequence[Objective]) -> float:
        """Worst share of its bound that an objective leaves: 0.1 is 10 % below, -1 twice over.

        ``-inf`` where no request has the metric.
        """
        return min(
            -math.inf if value is None else 1 - value / objective.seconds
            for objective, value in zip(objectives, self.values(objectives), strict=True)
        )

    def holds(self, objectives: Sequence[Objective]) -> bool:
        """Whether all objectives hold, and would go on to hold: latency did not grow."""
        return self.slack(objectives) >= 0 and self.growth is None


@dataclass
class Scenario:
    """What every trial has in common.

    Attributes:
        load: at the rate asked for; its number of requests is a full run's.
        total_pages: of each worker.
        mask_buffer: L where the candidate names none.
    """

    load: Load
    costs: CostOptions
    commits: CommitCounts
    objectives: tuple[Objective, ...]
    total_pages: int
    mask_buffer: int | None = None
    _taken: list[TraceRequest] = field(default_factory=list, repr=False)
    _model: CostModel | None = field(default=None, repr=False)

    def run(self, job: Job) -> Trial:
        """Simulate; the same job gives the same trial, in any process.

        Raises:
            ConfigurationError: a request can never fit a worker, or its length is not known.
            TraceError: the trace has too few requests.
        """
        if self._model is None:
            self._model = self.costs.cost_model()
        candidate = job.candidate
        system = candidate.policy.system(
            Split.parse(candidate.split),
            self.total_pages,
            system=self.costs.system,
            buffer=self.mask_buffer,
        )
        plan = self.plan(job.rate, job.num_requests)
        result = simulate(plan, system, self._model, self.commits, seed=self.load.trace.seed)
        return Trial(
            job,
            summarise(result.records),
            _growth(result.records),
            _busy_shares(candidate, result),
            tuple(result.records) if job.keeps_records else (),
        )

    def plan(self, rate: float, num_requests: int) -> list[Due]:
        """The first requests of the trace at a rate."""
        load = replace(self.load.at(rate), num_requests=num_requests, duration_seconds=None)
        return planned(load, self._take)

    def _take(self, trace: TraceSpec, count: int) -> list[TraceRequest]:
        # The first requests of a longer list are those of a shorter one; files take long to read.
        if len(self._taken) < count:
            self._taken = take_requests(trace, count)
        return self._taken[:count]


def _growth(records: Sequence[RequestRecord]) -> str | None:
    if len(records) < MIN_JUDGED:
        return None
    filled = records[len(records) // 3 :]
    return run_of(RunLabel("simulated"), filled).saturation


def _busy_shares(candidate: Candidate, result: Simulation) -> dict[str, float]:
    shares: dict[str, list[float]] = {}
    for role, share in zip(Split.parse(candidate.split).roles(), result.busy_shares, strict=True):
        shares.setdefault(role.value[0].upper(), []).append(share)
    return {letter: sum(found) / len(found) for letter, found in shares.items()}
