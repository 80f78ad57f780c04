"""Candidates, scenarios and trials with defaults."""

from dataclasses import replace
from typing import Any

from sangam_loadtest.arrivals import Arrivals
from sangam_loadtest.capacity import Objective
from sangam_loadtest.load import Load
from sangam_loadtest.recommend.candidates import Candidate, Mode, mode_of
from sangam_loadtest.recommend.trials import Job, Scenario, Trial
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.simulator.commits import GeometricCommits
from sangam_loadtest.summary import summarise
from sangam_loadtest.system_options import CostOptions, PolicyOptions
from sangam_loadtest.traces.source import TraceSpec

LATENCY = Objective("latency", "mean", 7.0)


def candidate(split: str = "8C", **policy: Any) -> Candidate:
    return Candidate(
        split, replace(PolicyOptions(overflow=mode_of(split) is Mode.HYBRID), **policy)
    )


def scenario(
    rate: float = 2.5,
    num_requests: int = 40,
    objectives: tuple[Objective, ...] = (LATENCY,),
    trace: str = "sharegpt",
) -> Scenario:
    return Scenario(
        Load(TraceSpec(trace), Arrivals(rate=rate), num_requests),
        CostOptions(),
        GeometricCommits.calibrated(1.7),
        objectives,
        total_pages=6000,
    )


def trial(
    latency_seconds: float = 3.0,
    chosen: Candidate | None = None,
    *,
    rate: float = 10.0,
    num_requests: int = 100,
    growth: str | None = None,
) -> Trial:
    """A trial of two requests with this latency."""
    records = [
        RequestRecord(index, float(index), float(index), 10, 10, latency_seconds=latency_seconds)
        for index in range(2)
    ]
    job = Job(chosen or candidate(), rate, num_requests)
    return Trial(job, summarise(records), growth, {"C": 0.5})
