"""What a run leaves on disk beside its records: the summary file, and the label that names it.

Decides the names and the top level of ``NAME.summary.json``, of measured and simulated runs
alike. Written by ``run`` and ``simulate``, read by ``report``.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from sangam_core.errors import ConfigurationError
from sangam_loadtest.load import Load
from sangam_loadtest.summary import Summary

Kind = Literal["measured", "simulated"]


@dataclass(frozen=True, slots=True)
class RunLabel:
    """What was run, in the few words by which runs are compared. None where it is not known.

    Attributes:
        kind: None where a report reads records that nobody labelled.
        configuration: what a user calls the deployment, e.g. ``4P4D``.
        trace: a named trace, or a file's name without its folder and suffix.
        rate: the nominal one, requests a second.
        system: ``sangam``, or another whose behaviour was measured or simulated.
    """

    kind: Kind | None
    configuration: str | None = None
    model: str | None = None
    trace: str | None = None
    rate: float | None = None
    system: str | None = None
    tau_tokens: int | None = None

    @classmethod
    def of(cls, kind: Kind, load: Load, **known: Any) -> "RunLabel":
        """The label of a run under a load; ``known`` are further fields."""
        return cls(kind, trace=Path(load.trace.trace).stem, rate=load.arrivals.rate, **known)


def default_records_path() -> Path:
    """Where records go that the user gave no name to: one file a run, by the time of its start."""
    return Path(".sangam/loadtest") / time.strftime("%Y%m%d-%H%M%S.jsonl")


def summary_path(records: Path) -> Path:
    """The summary file of a file of records."""
    return records.with_suffix(".summary.json")


def write_summary(
    records: Path,
    *,
    command: str,
    label: RunLabel,
    options: Mapping[str, Any],
    load: Load,
    summary: Summary,
    is_interrupted: bool = False,
) -> Path:
    """Write the summary beside a file of records; returns its path.

    Args:
        options: what was asked for, as plain data and without secrets.
    """
    path = summary_path(records)
    write_json(
        path,
        {
            "command": f"sangam loadtest {command}",
            "python": sys.version.split()[0],
            "label": asdict(label),
            "options": dict(options),
            "true_rate": load.true_rate,
            "is_interrupted": is_interrupted,
            "summary": summary.to_json(),
        },
    )
    return path


def opened(path: Path) -> TextIO:
    """A new file for results, its folder made where there is none.

    Raises:
        ConfigurationError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
