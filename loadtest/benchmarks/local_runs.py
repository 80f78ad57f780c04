"""Load tests of a cluster that is started on this machine for them: measured runs to compare with.

Decides what is started (one router, a few workers with the shipped model) and how a run is sent;
the processes are ``sangam up``'s, the client ``sangam loadtest run``'s. Called by
``simulator_check``.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sangam_core.errors import SangamError
from sangam_core.placement import Role
from sangam_loadtest.client.open_loop import Target
from sangam_loadtest.load import Load
from sangam_loadtest.records import RequestRecord, read_records, write_records
from sangam_loadtest.run import RunOptions, run
from sangam_loadtest.run_files import RunLabel, write_summary
from sangam_loadtest.simulator.system import Split
from sangam_loadtest.summary import summarise
from sangam_router.local.cluster import ClusterOptions, LocalCluster
from sangam_router.local.roles import RoleCounts

_START_SECONDS = 90.0
_TIMEOUT_SECONDS = 60.0


class RunFailed(SangamError):
    """A run whose latencies cannot be compared."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run that is over.

    Attributes:
        records: by index.
        others_cores: cores that processes which are no part of it used meanwhile, on average:
            they make passes longer, and no constant knows of them. None where ``/proc`` is not
            Linux's.
    """

    records: list[RequestRecord]
    others_cores: float | None


@dataclass(frozen=True, slots=True)
class LocalFleet:
    """A cluster that is up, and where its runs are kept."""

    split: Split
    cluster: LocalCluster
    folder: Path
    console: Console

    async def run(self, load: Load, name: str) -> MeasuredRun:
        """Send a load; its records are also kept as ``NAME.jsonl``.

        Raises:
            RunFailed: a request failed; the latencies of the others would tell nothing.
        """
        records = self.folder / f"{name}.jsonl"
        target = Target(tuple(self.cluster.public_urls), timeout_seconds=_TIMEOUT_SECONDS)
        options = RunOptions(load, target)
        before, started = self._others_seconds(), time.monotonic()
        result = await asyncio.to_thread(run, options, self.console, records, name)
        after, seconds = self._others_seconds(), time.monotonic() - started
        label = RunLabel.of(
            "measured", load, configuration=str(self.split), model=result.model, system="sangam"
        )
        write_summary(
            records,
            command="run",
            label=label,
            options=options.asked() | {"model": result.model},
            load=load,
            summary=result.summary,
        )
        for complaint in result.summary.complaints:
            self.console.print(f"{name}: the client was a bottleneck: {complaint}")
        if result.summary.num_failed or not result.summary.num_completed:
            raise RunFailed(f"{name}: failed: {result.summary.errors or 'all'}")
        return MeasuredRun(
            sorted(read_records(records), key=lambda record: record.index),
            None if before is None or after is None else (after - before) / seconds,
        )

    def _others_seconds(self) -> float | None:
        """CPU seconds of everything on the machine but this process and the cluster's."""
        own = [os.getpid(), *(process.pid for process in self.cluster.processes)]
        try:
            return others_seconds(pid for pid in own if pid is not None)
        except OSError:
            return None


@asynccontextmanager
async def local_fleet(split: Split, folder: Path, console: Console) -> AsyncIterator[LocalFleet]:
    """Start a router and the split's workers, each with one thread; all of it ends behind the
    block. Ports are free ones, so that another cluster may run beside it.

    Raises:
        ConfigurationError: the machine or the installation does not allow it.
        StartFailed: a process could not start.
    """
    counts = RoleCounts(
        prefill=split.counts.get(Role.PREFILL, 0),
        decode=split.counts.get(Role.DECODE, 0),
        colocated=split.counts.get(Role.COLOCATED, 0),
    )
    options = ClusterOptions(
        log_dir=folder / f"logs-{split}", roles=counts, start_seconds=_START_SECONDS
    )
    console.print(f"starting {counts} and a router")
    async with LocalCluster(options) as cluster:
        yield LocalFleet(split, cluster, folder, console)


def keep_simulated(path: Path, load: Load, split: Split, records: Sequence[RequestRecord]) -> None:
    """Write a simulation beside the run that it imitates, so that reports show both."""
    write_records(path, records)
    label = RunLabel.of(
        "simulated", load, configuration=str(split), model="sangam-small", system="sangam"
    )
    write_summary(
        path, command="simulate", label=label, options={}, load=load, summary=summarise(records)
    )


def others_seconds(own: Iterable[int], proc: Path = Path("/proc")) -> float:
    """CPU seconds of all processes but ``own`` since the machine started.

    Raises:
        OSError: there is no such file; the system is not Linux, or a process has ended.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system = (proc / "stat").read_text(encoding="ascii").split()[1:4]
    seconds = (int(user) + int(nice) + int(system)) / ticks
    for pid in own:
        # The name in parentheses may hold blanks; user and system time are the 14th and 15th word.
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2]
        seconds -= sum(map(int, text.split()[11:13])) / ticks
    return seconds
