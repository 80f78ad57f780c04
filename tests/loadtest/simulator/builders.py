"""Small simulations in round numbers: what a pass, a transfer and a host cost is a power of two.

Sums of such times are exact, so that tests can compare them without a tolerance.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sangam_core.placement import Role
from sangam_loadtest.costs.batch import PassBatch
from sangam_loadtest.costs.model import TransferCost
from sangam_loadtest.load import Due
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.simulator.clock import VirtualClock
from sangam_loadtest.simulator.simulate import Simulation, deployed, geometry_of, simulate
from sangam_loadtest.simulator.system import Split, System
from sangam_loadtest.simulator.worker import Iteration
from sangam_loadtest.traces.request import TraceRequest

PREFILL, DECODE, HOST = 1.0, 0.25, 0.0


@dataclass(frozen=True)
class FlatCosts:
    """A cost model that knows two kinds of iterations: those with a prefill, and the others."""

    prefill: float = PREFILL
    decode: float = DECODE
    host_seconds_per_request: float = HOST
    transfer_latency: float = 0.0
    transfer_busy: float = 0.0
    is_blocking: bool = False

    def seconds(self, batch: PassBatch) -> float:
        return self.prefill if batch.num_prefills else self.decode

    def transfer(self, num_tokens: int) -> TransferCost:
        return TransferCost(self.transfer_latency, self.transfer_busy, self.is_blocking)


@dataclass(frozen=True)
class EqualCommits:
    """So many tokens a pass, and what is left in a block's last."""

    tokens: int = 8

    def draw(self, rng: random.Random, num_masks: int, block: int) -> Sequence[int]:
        whole, rest = divmod(num_masks, self.tokens)
        return [self.tokens] * whole + [rest] * bool(rest)


def a_system(split: str = "1C", **changes: Any) -> System:
    """Room for everything, and a budget that one prefill of 64 tokens uses up."""
    tau = dict.fromkeys(Role, changes.pop("tau", 64))
    return System(Split.parse(split), **{"total_pages": 1000, "tau_tokens": tau, **changes})


def a_plan(*requests: tuple[float, int, int]) -> list[Due]:
    """Requests as (due, prompt tokens, output tokens); two at the same moment by default."""
    asked = requests or ((0.0, 32, 32), (0.0, 32, 32))
    return [
        Due(index, at, TraceRequest(prompt, output))
        for index, (at, prompt, output) in enumerate(asked)
    ]


def a_run(plan: Sequence[Due], system: System, **changes: Any) -> Simulation:
    """A simulation with round costs, eight tokens a pass unless said otherwise."""
    costs = changes.pop("costs", FlatCosts())
    commits = changes.pop("commits", EqualCommits())
    return simulate(plan, system, costs, commits, **changes)


@dataclass
class World:
    """A simulation whose insides can be looked at."""

    clock: VirtualClock
    driver: Any
    records: list[RequestRecord]
    iterations: list[Iteration]

    def run(self, until: Callable[[], bool] = lambda: False) -> "World":
        """Let time go on until something holds, or nothing is left to happen."""
        while not until() and self.clock.turn():
            pass
        return self


def a_world(plan: Sequence[Due], system: System, **changes: Any) -> World:
    """The same as ``a_run``, not yet run."""
    clock, records, iterations = VirtualClock(), [], []
    driver = deployed(
        system,
        changes.pop("costs", FlatCosts()),
        changes.pop("commits", EqualCommits()),
        clock,
        records.append,
        iterations.append,
        keeps_commits=True,
    )
    for due in plan:
        clock.at(
            due.at_seconds,
            lambda due=due: driver.submit(due, geometry_of(due.request, system), seed=0),
        )
    return World(clock, driver, records, iterations)
