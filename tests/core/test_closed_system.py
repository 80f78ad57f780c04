"""The policies, the lifecycle and the worker's scheduler as one system, watched at every step.

Random fleets, requests and faults run through ``small_world``. Whatever happens: every request
finishes with its tokens, prefills run in arrival order on each worker, no decode is displaced,
the admitted prefill tokens keep Algorithm 1's bound, pages are conserved and all free at the end,
and o_w is back to 0.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.small_world import MASK, Driver, SmallWorld, Worker, WorkerSpec

from sangam_core.lifecycle import Phase
from sangam_core.placement import PlacementPolicy, Role
from sangam_core.wire import BlockKey
from sangam_worker.block_state import Stage
from sangam_worker.plan import Plan

POOL_PAGES = 12
"""Holds the largest request below (10 pages), so nothing has to be refused."""
TICKS_PER_BLOCK = 60
"""A deadline in ticks: a block takes at most 8 passes and a few faults."""


# -- what is watched -------------------------------------------------------------------------


@dataclass
class BusyPeriod:
    """Algorithm 1's bound over a worker's iterations since its queue was last empty."""

    bound_tokens: int = 0
    admitted_tokens: int = 0


@dataclass
class Watcher:
    """Checks every plan; ``world`` is set when the world that it watches exists."""

    world: SmallWorld | None = None
    num_decodes_seen: int = 0
    num_waits_seen: int = 0
    periods: dict[str, BusyPeriod] = field(default_factory=lambda: defaultdict(BusyPeriod))

    def watch_plan(
        self, worker: Worker, before: dict[BlockKey, Stage], carried: int, plan: Plan | None
    ) -> None:
        passes = () if plan is None else plan.passes
        admitted = [item.key for item in passes if item.is_whole_sequence]
        decodes = [item.key for item in passes if not item.is_whole_sequence]
        assert [item.key for item in passes] == decodes + admitted, "decodes come first"
        self._check_no_decode_is_displaced(worker, before, decodes)
        self._check_arrival_order(worker, before, admitted)
        self._check_bound(worker, carried, plan)
        if plan is None:
            self._check_nothing_could_run(worker)

    def _check_no_decode_is_displaced(
        self, worker: Worker, before: dict[BlockKey, Stage], decodes: list[BlockKey]
    ) -> None:
        running = {key for key, stage in before.items() if stage is Stage.DECODING}
        joined = {key for key, stage in before.items() if stage is Stage.PARKED}
        assert running <= set(decodes) <= running | joined
        assert len(decodes) == len(set(decodes))
        self.num_decodes_seen += len(decodes)

    def _check_arrival_order(
        self, worker: Worker, before: dict[BlockKey, Stage], admitted: list[BlockKey]
    ) -> None:
        waiting = sorted(
            (key for key, stage in before.items() if stage is Stage.WAITING), key=self._order
        )
        assert admitted == waiting[: len(admitted)]
        self.num_waits_seen += len(waiting) - len(admitted)

    def _check_bound(self, worker: Worker, carried: int, plan: Plan | None) -> None:
        period = self.periods[worker.epoch]
        tau = worker.scheduler.tau_tokens
        decodes = 0 if plan is None else plan.num_decode_tokens
        admitted = 0 if plan is None else plan.num_prefill_tokens
        period.bound_tokens += tau - decodes + max(0, decodes - tau - carried)
        is_idle_rule = decodes == 0 and admitted > carried + tau
        if not is_idle_rule:
            period.admitted_tokens += admitted
        assert period.admitted_tokens <= period.bound_tokens
        if worker.scheduler.num_waiting == 0:
            self.periods[worker.epoch] = BusyPeriod()

    def _check_nothing_could_run(self, worker: Worker) -> None:
        stages = worker.stages
        assert set(stages.values()) <= {Stage.WAITING, Stage.HOLDING, Stage.ARRIVING}
        waiting = [key for key, stage in stages.items() if stage is Stage.WAITING]
        if waiting:
            head = self._driver(min(waiting, key=self._order))
            assert head.demand.num_pages > worker.scheduler.pages.num_free

    def _order(self, key: BlockKey) -> tuple[float, str]:
        return self._driver(key).request.order

    def _driver(self, key: BlockKey) -> Driver:
        assert self.world is not None
        return self.world.drivers[key.request_id]


def check_pages(world: SmallWorld) -> None:
    """No page is lost or held twice, and the ledger promises none that is not there."""
    for worker in world.workers.values():
        scheduler = worker.scheduler
        held = [page for key in worker.stages for page in scheduler.pages_of(key)]
        assert len(held) == len(set(held))
        assert len(held) + scheduler.pages.num_free == worker.spec.total_pages
        assert 0 <= world.ledger.pages(worker.worker_id) <= worker.spec.total_pages
        assert world.ledger.load_tokens(worker.worker_id) >= 0


def check_at_rest(world: SmallWorld) -> None:
    """Nothing is held anywhere once nothing is under way."""
    assert world.ledger.num_records == 0
    for worker in world.workers.values():
        assert worker.scheduler.is_empty
        assert worker.scheduler.pages.num_free == worker.spec.total_pages
        assert world.ledger.pages(worker.worker_id) == 0
        assert world.ledger.load_tokens(worker.worker_id) == 0, "o_w returns to 0"


def check_answer(driver: Driver) -> None:
    """The client has every token up to the end, and they are the model's."""
    if driver.request.phase is Phase.CANCELLED:
        return
    assert driver.request.phase is Phase.FINISHED
    answer = range(driver.request.geometry.prompt_tokens, len(driver.ids))
    if driver.eos_position is not None:
        answer = range(answer.start, driver.eos_position + 1)
    assert [driver.ids[p] for p in answer] == [driver.expected_token(p) for p in answer]
    # Passes end at the EOS: the blocks behind it never run.
    last = driver.request.geometry.block_stop(driver.request.block)
    assert set(driver.ids[last:]) <= {MASK}


# -- random systems --------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestSpec:
    """A request, and the tick at which it comes."""

    at_tick: int
    prompt_tokens: int
    num_blocks: int
    cache: str
    eos_offset: int | None


@dataclass(frozen=True)
class Fault:
    """Something that happens to whoever is there at that tick."""

    at_tick: int
    kind: str
    pick: int


ROLE_SETS = st.sampled_from(
    [
        [Role.COLOCATED],
        [Role.COLOCATED] * 3,
        [Role.PREFILL, Role.COLOCATED],
        [Role.PREFILL, Role.PREFILL, Role.COLOCATED],
        [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.COLOCATED],
        [Role.PREFILL, Role.COLOCATED, Role.COLOCATED],
    ]
)
REQUESTS = st.builds(
    RequestSpec,
    at_tick=st.integers(0, 20),
    prompt_tokens=st.integers(0, 120),
    num_blocks=st.integers(1, 4),
    cache=st.sampled_from(["dual", "dual", "prefix", "none"]),
    eos_offset=st.none() | st.integers(0, 31),
).filter(lambda spec: spec.eos_offset is None or spec.eos_offset < 8 * spec.num_blocks)
FAULTS = st.builds(
    Fault,
    at_tick=st.integers(1, 40),
    kind=st.sampled_from(["cancel", "kill", "fail_transfer", "drain"]),
    pick=st.integers(0, 100),
)
TAUS = st.sampled_from([1, 8, 20, 64, 200, 2**31])
POLICIES = st.builds(
    PlacementPolicy,
    theta_tokens=st.sampled_from([1, 64, 400, math.inf]),
    is_overflow_allowed=st.booleans(),
)


def watched_world(
    watcher: Watcher,
    roles: list[Role],
    total_pages: int,
    tau: int,
    policy: PlacementPolicy,
    seed: int,
) -> SmallWorld:
    fleet = [
        WorkerSpec(f"{role}-{number}", role, total_pages, tau) for number, role in enumerate(roles)
    ]
    watcher.world = SmallWorld(fleet, policy, Random(seed), watcher.watch_plan)
    return watcher.world


def strike(world: SmallWorld, fault: Fault, dead: list[tuple[int, WorkerSpec]]) -> None:
    """Let a fault happen, if there is anyone it can happen to."""

    drivers = {"cancel": world.unfinished, "fail_transfer": world.in_phase(Phase.TRANSFERRING)}
    victims = drivers.get(fault.kind, [])
    workers = list(world.workers.values())
    if fault.kind == "cancel" and victims:
        world.cancel(victims[fault.pick % len(victims)])
    elif fault.kind == "fail_transfer" and victims:
        world.fail_transfer(victims[fault.pick % len(victims)])
    elif fault.kind == "kill" and workers:
        worker = workers[fault.pick % len(workers)]
        world.kill(worker)
        dead.append((world.now + 1 + fault.pick % 10, worker.spec))
    elif fault.kind == "drain" and workers:
        world.drain(workers[fault.pick % len(workers)], Role.COLOCATED)


def run_to_the_end(world: SmallWorld, requests: list[RequestSpec], faults: list[Fault]) -> None:
    num_blocks = sum(spec.num_blocks for spec in requests)
    deadline = TICKS_PER_BLOCK * (num_blocks + len(faults)) + 200
    dead: list[tuple[int, WorkerSpec]] = []
    due = sorted(requests, key=lambda spec: spec.at_tick)
    while due or dead or world.unfinished or any(w.plan for w in world.workers.values()):
        assert world.now < deadline, [driver.request for driver in world.unfinished]
        while due and due[0].at_tick <= world.now:
            spec = due.pop(0)
            world.submit(
                spec.prompt_tokens, spec.num_blocks, cache=spec.cache, eos_offset=spec.eos_offset
            )
        for fault in faults:
            if fault.at_tick == world.now:
                strike(world, fault, dead)
        for item in [item for item in dead if item[0] <= world.now]:
            dead.remove(item)
            world.start_worker(item[1])
        world.tick()
        check_pages(world)


@given(
    roles=ROLE_SETS,
    tau=TAUS,
    policy=POLICIES,
    requests=st.lists(REQUESTS, min_size=1, max_size=8),
    faults=st.lists(FAULTS, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_every_request_finishes_and_everything_is_given_back(
    roles: list[Role],
    tau: int,
    policy: PlacementPolicy,
    requests: list[RequestSpec],
    faults: list[Fault],
    seed: int,
) -> None:
    watcher = Watcher()
    world = watched_world(watcher, roles, POOL_PAGES, tau, policy, seed)
    run_to_the_end(world, requests, faults)
    check_at_rest(world)
    for driver in world.drivers.values():
        check_answer(driver)


STORM_FLEETS = [
    [Role.COLOCATED] * 3,
    [Role.PREFILL, Role.COLOCATED, Role.COLOCATED],
    [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.COLOCATED],
]
STORM_KINDS = ["kill", "kill", "kill", "fail_transfer", "cancel"]


@pytest.mark.parametrize("seed", range(18))
def test_a_storm_of_faults_loses_no_request(seed: int) -> None:
    """Denser than what is drawn above: blocks are lost again and again, mid-way."""
    random = Random(seed)
    requests = [
        RequestSpec(
            at_tick=random.randint(0, 60),
            prompt_tokens=random.randint(0, 60),
            num_blocks=random.randint(1, 4),
            cache=random.choice(["dual", "prefix", "none"]),
            eos_offset=random.choice([None, None, random.randint(0, 7)]),
        )
        for _ in range(16)
    ]
    faults = [
        Fault(tick, random.choice(STORM_KINDS), random.randint(0, 9))
        for tick in range(1, 100)
        if random.random() < 0.2
    ]
    watcher = Watcher()
    policy = PlacementPolicy(theta_tokens=100)
    tau = 50 if seed % 2 else 500
    world = watched_world(watcher, STORM_FLEETS[seed % 3], 60, tau, policy, seed)
    run_to_the_end(world, requests, faults)
    check_at_rest(world)
    for driver in world.drivers.values():
        check_answer(driver)
    assert sum(driver.request.num_lost for driver in world.drivers.values()) > 0
