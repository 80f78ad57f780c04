"""Runs trials on every core, keeping each one's records, so that an interrupted run goes on.

Decides nothing about what is run. Called by ``__main__``.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sangam_loadtest.records import read_records, write_records
from sangam_loadtest.report.runs import Run, run_of
from sangam_loadtest.reproduction.trial import Trial, without_placements
from sangam_loadtest.run_files import write_summary
from sangam_loadtest.summary import summarise

Results = dict[Trial, Run]
"""Every trial with its run; a trial of two studies is there for each."""


def run_trials(trials: Iterable[Trial], folder: Path, console: Console) -> Results:
    """Run what has no file yet, and read all files.

    Args:
        folder: takes the records and summaries, ``sangam loadtest report`` reads them as well.
    """
    wanted = list(dict.fromkeys(trials))
    folder.mkdir(parents=True, exist_ok=True)
    missing = {t.digest: t for t in wanted if not t.path(folder).exists()}
    with (
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        ) as bar,
        ProcessPoolExecutor(os.cpu_count()) as pool,
    ):
        task = bar.add_task("simulating", total=len(missing))
        # The longest first, so that no core is left with one at the end.
        longest = sorted(missing.values(), key=lambda t: -t.num_requests * t.rate)
        futures = [pool.submit(_run_trial, trial, folder) for trial in longest]
        for future in as_completed(futures):
            future.result()
            bar.advance(task)
    return {trial: _read(trial, folder) for trial in wanted}


def _run_trial(trial: Trial, folder: Path) -> None:
    result = trial.run()
    records = without_placements(result.records)
    path = trial.path(folder)
    write_summary(
        path,
        command="simulate",
        label=trial.run_label,
        options={**asdict(trial), "busy_shares": result.busy_shares},
        load=trial.load,
        summary=summarise(records),
    )
    # Last, and whole or not at all: this file says that the trial is done.
    part = path.with_suffix(".part")
    write_records(part, records)
    part.replace(path)


def _read(trial: Trial, folder: Path) -> Run:
    path = trial.path(folder)
    return run_of(trial.run_label, read_records(path), source=str(path))
