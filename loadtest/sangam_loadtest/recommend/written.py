"""What a search leaves on disk: every trial as a CSV, and the recommendation as JSON.

Decides names and columns. Called by the command.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sangam_core.errors import ConfigurationError
from sangam_loadtest.capacity import Objective
from sangam_loadtest.recommend.candidates import Candidate
from sangam_loadtest.recommend.deploy import helm_values, local_command
from sangam_loadtest.recommend.search import Finalist
from sangam_loadtest.recommend.trials import Trial

CANDIDATES_NAME = "candidates.csv"
RECOMMENDATION_NAME = "recommendation.json"
FIGURE_NAME = "capacity.png"
RECORDS_NAME = "best.jsonl"


def write_candidates(
    trials: Sequence[Trial], objectives: Sequence[Objective], folder: Path
) -> None:
    """Every run of the search, a row each, the longest and best first.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    bounded = [f"{o.metric} {o.statistic} (s)" for o in objectives]
    order = sorted(trials, key=lambda t: (-t.job.num_requests, -t.slack(objectives)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / CANDIDATES_NAME).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            settings = (
                "mode,split,tau,tau_prefill,theta,placement,admission,max_blocks,"
                "rate,requests,slack,growth"
            )
            writer.writerow([*settings.split(","), *bounded])
            writer.writerows([*_row(t, objectives), *t.values(objectives)] for t in order)
    except OSError as error:
        raise ConfigurationError(f"{folder}: {error.strerror}") from error


def _row(trial: Trial, objectives: Sequence[Objective]) -> list[object]:
    candidate, policy = trial.candidate, trial.candidate.policy
    return [
        candidate.mode.value,
        candidate.split,
        policy.tau,
        policy.tau_prefill,
        policy.theta,
        policy.placement,
        policy.admission,
        policy.max_blocks,
        trial.job.rate,
        trial.job.num_requests,
        round(trial.slack(objectives), 6),
        trial.growth or "",
    ]


def recommendation(
    finalists: Sequence[Finalist], objectives: Sequence[Objective], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of the JSON file: what was asked, and each finalist, the best first."""
    return {
        "command": "sangam loadtest recommend",
        "asked": dict(asked),
        "objectives": [str(objective) for objective in objectives],
        "finalists": [_finalist(f, objectives, asked["model"]) for f in finalists],
    }


def _finalist(finalist: Finalist, objectives: Sequence[Objective], model: str) -> dict[str, Any]:
    trial = finalist.trial
    names = [str(objective) for objective in objectives]
    return {
        **candidate_told(trial.candidate, model),
        "holds": finalist.holds,
        "slack": _finite(trial.slack(objectives)),
        "values": dict(zip(names, trial.values(objectives), strict=True)),
        "growth": trial.growth,
        "busy_shares": trial.busy_shares,
        "highest_rate_held": finalist.capacity.highest_held,
        "lowest_rate_violated": finalist.capacity.lowest_violated,
        "margin": finalist.margin,
        "summary": trial.summary.to_json(),
        "rates": [
            {
                "rate": t.job.rate,
                "values": dict(zip(names, t.values(objectives), strict=True)),
                "slack": _finite(t.slack(objectives)),
                "growth": t.growth,
            }
            for t in finalist.curve
        ],
    }


def candidate_told(candidate: Candidate, model: str) -> dict[str, Any]:
    """A candidate as plain data, with what deploys it."""
    policy = {name: _finite(value) for name, value in asdict(candidate.policy).items()}
    return {
        "mode": candidate.mode.value,
        "split": candidate.split,
        "policy": policy,
        "helm_values": helm_values(candidate, model),
        "local_command": local_command(candidate),
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
