"""One simulation from start to end: requests in, records out, under virtual time.

Decides L of each request and when a hopeless run is cut short. Called by the ``simulate`` and
``recommend`` commands and by the reproduction.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sangam_core.errors import ConfigurationError
from sangam_core.geometry import Geometry
from sangam_loadtest.costs.model import CostModel
from sangam_loadtest.load import Due
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.simulator.clock import VirtualClock
from sangam_loadtest.simulator.commits import CommitCounts
from sangam_loadtest.simulator.driver import SimulatedDriver
from sangam_loadtest.simulator.system import System
from sangam_loadtest.simulator.tokens import MASK_ID
from sangam_loadtest.simulator.worker import Iteration, SimulatedWorker
from sangam_loadtest.traces.request import TraceRequest
from sangam_worker.scheduler import Scheduler

TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a simulation gave.

    Attributes:
        records: by index.
        busy_shares: of each worker, over the whole of the virtual time.
        virtual_seconds: from the start of the load to the last event.
    """

    records: list[RequestRecord]
    busy_shares: list[float]
    virtual_seconds: float
    num_iterations: int


def simulate(
    plan: Sequence[Due],
    system: System,
    costs: CostModel,
    commits: CommitCounts,
    *,
    seed: int = 0,
    keeps_commits: bool = False,
    watch: Callable[[Iteration], None] | None = None,
    progress: Callable[[int], None] | None = None,
    timeout_seconds: float | None = None,
) -> Simulation:
    """Run every request through the system; the same arguments give the same records.

    Args:
        plan: the requests, in order of arrival (``load.planned``).
        seed: of the commit counts.
        progress: told the number of finished requests now and then.
        timeout_seconds: a request still under way so long after the last one was due counts as
            failed (``timeout``), and the simulation ends there. None waits for every answer.

    Raises:
        ConfigurationError: a request can never fit a worker's pages.
    """
    clock = VirtualClock()
    records: list[RequestRecord] = []

    def finished(record: RequestRecord) -> None:
        records.append(record)
        if progress is not None and len(records) % 100 == 0:
            progress(len(records))

    num_iterations = 0

    def count(iteration: Iteration) -> None:
        nonlocal num_iterations
        num_iterations += 1
        if watch is not None:
            watch(iteration)

    driver = deployed(system, costs, commits, clock, finished, count, keeps_commits=keeps_commits)
    _arrive(plan, system, clock, driver, seed)
    limit = math.inf if timeout_seconds is None else plan[-1].at_seconds + timeout_seconds
    while clock.turn(limit):
        pass
    if driver.num_under_way and timeout_seconds is None:
        waiting = driver.fleet.num_waiting
        raise AssertionError(
            f"{driver.num_under_way} requests never ended; {waiting[0]} wait for a prefill, "
            f"{waiting[1]} for a decode"
        )
    records += driver.given_up(TIMEOUT)
    records.sort(key=lambda record: record.index)
    busy = [worker.busy_seconds / (clock.now or 1.0) for worker in driver.workers]
    return Simulation(records, busy, clock.now, num_iterations)


def deployed(
    system: System,
    costs: CostModel,
    commits: CommitCounts,
    clock: VirtualClock,
    finished: Callable[[RequestRecord], None],
    watch: Callable[[Iteration], None] | None = None,
    *,
    keeps_commits: bool = False,
) -> SimulatedDriver:
    """A driver with its workers, all idle; arguments as ``simulate``'s and the driver's."""
    driver = SimulatedDriver(system, costs, commits, clock, finished, keeps_commits=keeps_commits)
    driver.workers = [
        SimulatedWorker(
            number,
            role,
            Scheduler(
                mask_id=MASK_ID,
                total_pages=system.total_pages,
                tau_tokens=system.tau_tokens[role],
                transferred_decode_share=system.transferred_decode_share,
                admission=system.admission,
                max_batch_blocks=system.max_batch_blocks,
            ),
            costs.seconds,
            clock,
            driver.passed,
            watch,
        )
        for number, role in enumerate(system.split.roles())
    ]
    return driver


def _arrive(
    plan: Sequence[Due], system: System, clock: VirtualClock, driver: SimulatedDriver, seed: int
) -> None:
    """Set every arrival; one event sets the next, so that the queue of events stays short."""
    geometries = [geometry_of(due.request, system) for due in plan]

    def arrive(number: int) -> None:
        due = plan[number]
        if number + 1 < len(plan):
            clock.at(plan[number + 1].at_seconds, lambda: arrive(number + 1))
        driver.submit(due, geometries[number], seed)

    clock.at(plan[0].at_seconds, lambda: arrive(0))


def geometry_of(request: TraceRequest, system: System) -> Geometry:
    """Prompt and mask buffer of a request.

    Raises:
        ConfigurationError: its length is not known, its answer exceeds L, or no worker could
            ever hold it.
    """
    if request.prompt_tokens < 1 or not request.is_exact_output:
        raise ConfigurationError(
            "a trace whose answers end where the model ends them (questions) cannot be simulated; "
            "use one of lengths: sharegpt, arxiv, or a file"
        )
    buffer = system.mask_buffer_tokens
    if buffer is not None and request.output_tokens > buffer:
        raise ConfigurationError(
            f"an answer of {request.output_tokens} tokens exceeds L = {buffer}; "
            f"filter the trace (--max-output {buffer})"
        )
    geometry = Geometry.for_answer(
        request.prompt_tokens, buffer or request.output_tokens, system.block_length
    )
    if geometry.num_pages > system.total_pages:
        raise ConfigurationError(
            f"a request of {geometry.total_tokens} tokens needs {geometry.num_pages} pages, a "
            f"worker has {system.total_pages}; filter the trace (--max-total)"
        )
    return geometry
