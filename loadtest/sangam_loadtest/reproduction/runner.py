"""Runs trials on every core, keeping each one's records, so that an interrupted run goes on.

Decides nothing about what is run. Called by ``__main__``.
"""

import math
import multiprocessing
import os
import signal
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sangam_loadtest.records import read_records, write_records
from sangam_loadtest.report.runs import Run, run_of
from sangam_loadtest.reproduction.trial import Trial, without_placements
from sangam_loadtest.run_files import write_summary
from sangam_loadtest.summary import summarise

_LINE_EVERY = 20

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
    # The longest first, so that no core is left with one at the end.
    longest = sorted(missing.values(), key=lambda t: -t.num_requests * t.rate)
    pool = ProcessPoolExecutor(
        os.cpu_count(), multiprocessing.get_context("spawn"), initializer=_leave_ctrl_c_to_parent
    )
    try:
        futures = [pool.submit(_run_trial, trial, folder) for trial in longest]
        _show(futures, console)
    finally:
        # After Ctrl-C: those that have begun end within seconds, and are kept.
        pool.shutdown(cancel_futures=True)
    return {trial: _read(trial, folder) for trial in wanted}


def _show(futures: Sequence[Future[None]], console: Console) -> None:
    """A bar on a terminal, else a line now and then."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("simulating", total=len(futures))
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            bar.advance(task)
            if not console.is_terminal and done % _LINE_EVERY == 0:
                console.print(f"{done} of {len(futures)} simulated")


def _leave_ctrl_c_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run_trial(trial: Trial, folder: Path) -> None:
    result = trial.run()
    records = without_placements(result.records)
    path = trial.path(folder)
    write_summary(
        path,
        command="simulate",
        label=trial.run_label,
        options={
            # JSON knows no infinity.
            **{k: str(v) if v == math.inf else v for k, v in asdict(trial).items()},
            "busy_shares": result.busy_shares,
        },
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
