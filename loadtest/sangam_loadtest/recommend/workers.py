"""Runs trials in as many processes as there are cores, and stops them at once when asked to.

Decides nothing about what is run. Called by ``search``.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from threading import Thread
from types import TracebackType
from typing import Self

from sangam_core.errors import SangamError
from sangam_loadtest.recommend.trials import Job, Scenario, Trial

_scenario: Scenario | None = None  # of a process of the pool


class ProcessLost(SangamError):
    """A process that simulated is gone, and its trial with it."""


class SimulationProcesses:
    """Processes that each know the scenario. With one job there are none: trials run here.

    A context manager; leaving it by an exception (Ctrl-C is one) ends what is running.

    """

    def __init__(self, scenario: Scenario, num_jobs: int) -> None:
        self.scenario = scenario
        self.num_jobs = num_jobs
        self._others = set(multiprocessing.active_children())
        self._pool = None
        if num_jobs > 1:
            # Not forked: progress bars have threads, and a fork would copy their locks.
            self._pool = ProcessPoolExecutor(
                num_jobs,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(scenario,),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is None:
            return
        if error is not None:
            self.kill()
        self._pool.shutdown(cancel_futures=True)

    def kill(self) -> None:
        """End every process; what waits for a trial gets an error."""
        for process in set(multiprocessing.active_children()) - self._others:
            process.terminate()

    def run(self, job: Job) -> Trial:
        """One trial; may be called from several threads.

        Raises:
            ProcessLost: a process of the pool has ended.
            SangamError: what is asked for cannot be simulated.
        """
        return next(self.run_all([job]))

    def run_all(self, jobs: Sequence[Job]) -> Iterator[Trial]:
        """Trials as they are made; errors as ``run``'s."""
        if self._pool is None:
            yield from (self.scenario.run(job) for job in jobs)
            return
        try:
            for future in as_completed([self._pool.submit(_run, job) for job in jobs]):
                yield future.result()
        except BrokenProcessPool as error:
            raise ProcessLost(
                "a simulating process has ended, perhaps for want of memory; try fewer (--jobs)"
            ) from error


def _begin(scenario: Scenario) -> None:
    global _scenario
    _scenario = scenario
    # What started this process may be killed, and then cannot end it.
    Thread(target=_end_with_parent, daemon=True).start()
    # A terminal sends Ctrl-C to all; the one that was started decides, and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(job: Job) -> Trial:
    assert _scenario is not None
    return _scenario.run(job)
