"""A whole deployment in one file, without time, processes or tensors.

It shows how the pure parts fit together, and is what ``test_closed_system`` watches. Real are
``advance``, ``place_prefill``, ``place_decode``, ``block_state_from`` and the worker's
``Scheduler`` (with admission and pages); toys are the engine (it commits one to three random
masks a pass, and a token depends on request and position alone), the network (calls arrive at once,
transfers take some ticks) and the ledger (``small_ledger``).

One ``tick`` is: place what waits, let every idle worker plan, let some of the transfers and of
the planned iterations end. Between ticks a test submits, cancels, kills and drains as it likes:
plans and transfers are then under way.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from tests.core.small_ledger import SmallLedger

from sangam_core.answer import Completion
from sangam_core.decoding import Commit, Decoding, Resume
from sangam_core.geometry import Geometry
from sangam_core.lifecycle import Event, Phase, Request, advance
from sangam_core.placement import (
    Demand,
    FleetLoad,
    PlacementPolicy,
    Role,
    WorkerLoad,
    place_decode,
    place_prefill,
)
from sangam_core.wire import BlockKey, BlockStart, KVSource, WireGeometry
from sangam_worker.block_state import BlockState, Stage, block_state_from
from sangam_worker.plan import Outcome, Pass, PassOutcome, Plan
from sangam_worker.scheduler import Progress, Scheduler
from sangam_worker.strategies import strategy_named

MASK, EOS, VOCABULARY = 99, 98, 100


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker starts with."""

    worker_id: str
    role: Role
    total_pages: int
    tau_tokens: int


@dataclass(slots=True, eq=False)
class Worker:
    """A running worker: its scheduler, and the plan that its engine is running."""

    spec: WorkerSpec
    role: Role
    epoch: str
    scheduler: Scheduler
    plan: Plan | None = None
    is_draining: bool = False
    states: dict[BlockKey, BlockState] = field(default_factory=dict)
    """Of every block that has come, also of those that are gone."""

    @property
    def worker_id(self) -> str:
        return self.spec.worker_id

    @property
    def stages(self) -> dict[BlockKey, Stage]:
        """Every block here, and where it stands."""
        here = self.scheduler.keys()
        return {key: self.states[key].stage for key in here}

    def told(self, start: BlockStart) -> BlockState:
        """The state of a block that has come."""
        state = self.states[start.key] = block_state_from(start, MASK, VOCABULARY)
        return state


@dataclass(slots=True, eq=False)
class Driver:
    """What a router knows of one request: its lifecycle, the client's tokens, its places."""

    request: Request
    decoding: Decoding
    ids: list[int]
    eos_position: int | None
    step: int = 0
    commits: list[Commit] = field(default_factory=list)
    prefill_worker: Worker | None = None
    decode_worker: Worker | None = None

    @property
    def key(self) -> BlockKey:
        request = self.request
        return BlockKey(request_id=request.request_id, block=request.block, attempt=request.attempt)

    @property
    def demand(self) -> Demand:
        geometry = self.request.geometry
        keeps_kv = strategy_named(self.decoding.cache).keeps_kv
        return Demand(
            request_id=self.request.request_id,
            cost_tokens=geometry.total_tokens,
            num_pages=geometry.num_pages if keeps_kv else 0,
            needs_colocated=not keeps_kv,
        )

    @property
    def places(self) -> list[Worker]:
        """The workers that hold something of the current block."""
        return [worker for worker in (self.prefill_worker, self.decode_worker) if worker]

    def expected_token(self, position: int) -> int:
        """What the toy engine says at a position: an EOS at one, words elsewhere."""
        if position == self.eos_position:
            return EOS
        return (position * 7 + len(self.request.request_id)) % EOS


PlanWatcher = Callable[[Worker, dict[BlockKey, Stage], int, Plan | None], None]
"""Called with a worker, the stages and the carried budget before it planned, and its plan."""


class SmallWorld:
    """Routers, ledger and workers as one object.

    Args:
        random: decides what the engine commits and which iterations and transfers end.
        watch_plan: sees every plan as it is made.
    """

    def __init__(
        self,
        fleet: Iterable[WorkerSpec],
        policy: PlacementPolicy,
        random: Random,
        watch_plan: PlanWatcher = lambda *_: None,
    ) -> None:
        self.policy = policy
        self.random = random
        self.watch_plan = watch_plan
        self.now = 0
        self.ledger = SmallLedger()
        self.workers: dict[str, Worker] = {}
        self.drivers: dict[str, Driver] = {}
        self.num_prefills: Counter[Role] = Counter()
        self._num_epochs = 0
        for spec in fleet:
            self.start_worker(spec)

    # -- what a test does to it ---------------------------------------------------------------

    def submit(
        self,
        prompt_tokens: int,
        num_blocks: int,
        *,
        block_length: int = 8,
        cache: str = "dual",
        eos_offset: int | None = None,
    ) -> Driver:
        """A client's request. ``eos_offset``: where in the answer the model says EOS."""
        geometry = Geometry(prompt_tokens, num_blocks, block_length)
        request = Request(f"request-{len(self.drivers)}", float(self.now), geometry)
        driver = Driver(
            request=request,
            decoding=Decoding(cache=cache, eos_ids=(EOS,)),
            ids=[1] * prompt_tokens + [MASK] * geometry.mask_buffer_tokens,
            eos_position=None if eos_offset is None else prompt_tokens + eos_offset,
        )
        self.drivers[request.request_id] = driver
        return driver

    def cancel(self, driver: Driver) -> None:
        """The client goes away."""
        advance(driver.request, Event.CANCEL)
        self._release(driver)

    def start_worker(self, spec: WorkerSpec) -> None:
        """A process starts, with an epoch of its own."""
        self._num_epochs += 1
        scheduler = Scheduler(
            mask_id=MASK, total_pages=spec.total_pages, tau_tokens=spec.tau_tokens
        )
        epoch = f"epoch-{self._num_epochs}"
        self.workers[spec.worker_id] = Worker(spec, spec.role, epoch, scheduler)

    def kill(self, worker: Worker) -> None:
        """A process dies: its blocks start again elsewhere, its records are reaped."""
        del self.workers[worker.worker_id]
        for driver in self._ordered(lambda driver: worker in driver.places):
            self._lose(driver)
        self.ledger.reap(worker.worker_id, worker.epoch)

    def drain(self, worker: Worker, role: Role) -> None:
        """Admit nothing more; take the other role when everything here has ended."""
        worker.is_draining = True
        worker.spec = WorkerSpec(
            worker.worker_id, role, worker.spec.total_pages, worker.spec.tau_tokens
        )

    def fail_transfer(self, driver: Driver) -> None:
        """A transfer passes its deadline."""
        assert driver.request.phase is Phase.TRANSFERRING
        self._lose(driver)

    @property
    def unfinished(self) -> list[Driver]:
        """Requests that are not in a final phase, oldest first."""
        return self._ordered(lambda driver: not driver.request.phase.is_final)

    def in_phase(self, phase: Phase) -> list[Driver]:
        """Requests in a phase, oldest first."""
        return self._ordered(lambda driver: driver.request.phase is phase)

    # -- one tick -----------------------------------------------------------------------------

    def tick(self) -> None:
        """Place, plan, and let some of what is under way end."""
        self.now += 1
        self._place_in_order(Phase.PREFILLED, self._place_decode)
        self._place_in_order(Phase.WAITING, self._place_prefill)
        for worker in list(self.workers.values()):
            if worker.plan is None:
                self._plan(worker)
        for driver in self.in_phase(Phase.TRANSFERRING):
            if self.random.random() < 0.5:
                self._end_transfer(driver)
        for worker in list(self.workers.values()):
            if worker.plan is not None and self.random.random() < 0.7:
                self._end_iteration(worker, worker.plan)
            if worker.is_draining and worker.scheduler.is_empty:
                self.start_worker(worker.spec)

    def _place_in_order(self, phase: Phase, place: Callable[[Driver], bool]) -> None:
        """Strict head of line: nobody younger is placed while an older one waits."""
        for driver in self.in_phase(phase):
            if not place(driver):
                return

    def _place_prefill(self, driver: Driver) -> bool:
        chosen = place_prefill(self.fleet_load(), driver.demand, self.policy)
        if chosen is None:
            return False
        worker = self.workers[chosen.worker_id]
        advance(driver.request, Event.PREFILL_PLACED)
        driver.prefill_worker = worker
        self.num_prefills[worker.role] += 1
        place = (worker.worker_id, worker.epoch)
        self.ledger.reserve_load(driver.key, place, driver.demand.cost_tokens)
        self.ledger.reserve_pages(driver.key, place, driver.demand.num_pages)
        start = self._block_start(driver, worker, hands_over=worker.role is Role.PREFILL)
        worker.scheduler.submit(worker.told(start))
        return True

    def _place_decode(self, driver: Driver) -> bool:
        chosen = place_decode(self.fleet_load(), driver.demand)
        if chosen is None:
            return False
        worker = self.workers[chosen.worker_id]
        advance(driver.request, Event.DECODE_PLACED)
        place = (worker.worker_id, worker.epoch)
        self.ledger.reserve_pages(driver.key, place, driver.demand.num_pages)
        assert driver.prefill_worker is not None
        start = self._block_start(driver, worker, source=driver.prefill_worker)
        if not worker.scheduler.reserve(worker.told(start)):
            # The worker's own allocator is the authority: a cancelled block's pages come free
            # only when its running pass has ended.
            self.ledger.release_pages(driver.key, worker.worker_id)
            advance(driver.request, Event.PLACE_REFUSED)
            return False
        driver.decode_worker = worker
        return True

    def _plan(self, worker: Worker) -> None:
        scheduler = worker.scheduler
        stages, carried_tokens = worker.stages, scheduler.carried_tokens
        worker.plan = scheduler.next_plan()
        self.watch_plan(worker, stages, carried_tokens, worker.plan)

    def _end_transfer(self, driver: Driver) -> None:
        assert driver.prefill_worker is not None
        assert driver.decode_worker is not None
        driver.prefill_worker.scheduler.remove(driver.key)
        self.ledger.release_pages(driver.key, driver.prefill_worker.worker_id)
        driver.prefill_worker = None
        driver.decode_worker.scheduler.arrived(driver.key)
        advance(driver.request, Event.KV_ARRIVED)

    def _end_iteration(self, worker: Worker, plan: Plan) -> None:
        outcomes = tuple(PassOutcome(item.key, self._commits_of(item)) for item in plan.passes)
        worker.plan = None
        for progress in worker.scheduler.apply(Outcome(plan.iteration, outcomes)):
            self._follow(self.drivers[progress.key.request_id], progress)

    def _commits_of(self, item: Pass) -> tuple[Commit, ...]:
        """The toy engine: one to three of the masks."""
        if not item.masked:
            return ()
        num_commits = self.random.randint(1, min(3, len(item.masked)))
        positions = sorted(self.random.sample(item.masked, num_commits))
        driver = self.drivers[item.key.request_id]
        return tuple(Commit(position=p, token=driver.expected_token(p)) for p in positions)

    # -- a router's side of a block -----------------------------------------------------------

    def _follow(self, driver: Driver, progress: Progress) -> None:
        """Carry out what one pass means: tokens to the client, the lifecycle, the ledger."""
        assert progress.key == driver.key, "events of an earlier placement come to nobody"
        if progress.counts:
            assert progress.step == driver.step
            driver.step += 1
            for commit in progress.commits:
                assert driver.ids[commit.position] == MASK, "a committed token is never revised"
                driver.ids[commit.position] = commit.token
                driver.commits.append(commit)
        else:
            assert driver.demand.num_pages, "only lost KV is worth a pass that does not count"
        if progress.is_first_here:
            self.ledger.release_load(driver.key)
        if progress.completion is Completion.ANSWER:
            self._release(driver)
            advance(driver.request, Event.ANSWER_COMPLETE)
        elif progress.completion is Completion.BLOCK:
            self._release(driver)
            advance(driver.request, Event.BLOCK_COMPLETE)
            driver.step = 0
            driver.commits = []
        elif driver.request.phase is Phase.PREFILLING:
            moves = progress.stage is Stage.HOLDING
            advance(
                driver.request,
                Event.PREFILLED_FOR_TRANSFER if moves else Event.PREFILLED_IN_PLACE,
            )

    def _block_start(
        self,
        driver: Driver,
        worker: Worker,
        *,
        hands_over: bool = False,
        source: Worker | None = None,
    ) -> BlockStart:
        """A fresh block, a lost one that goes on, or one whose KV is fetched."""
        geometry = driver.request.geometry
        block = geometry.block_range(driver.request.block)
        ids = list(driver.ids)
        if source is None:
            ids[block.start : block.stop] = [MASK] * len(block)
        resume = None
        if driver.step:
            resume = Resume(
                step=driver.step, initial_masks=len(block), commits=tuple(driver.commits)
            )
        return BlockStart(
            key=driver.key,
            worker_epoch=worker.epoch,
            arrival_seconds=driver.request.arrival_seconds,
            ids=tuple(ids),
            geometry=WireGeometry.of(geometry),
            decoding=driver.decoding,
            hands_over=hands_over,
            source=None
            if source is None
            else KVSource(worker_id=source.worker_id, epoch=source.epoch, url=""),
            resume=resume,
        )

    def _lose(self, driver: Driver) -> None:
        self._release(driver)
        advance(driver.request, Event.BLOCK_LOST)

    def _release(self, driver: Driver) -> None:
        """Give back everything that the current placement holds, in the ledger and on workers."""
        for worker in driver.places:
            worker.scheduler.remove(driver.key)
            self.ledger.release_pages(driver.key, worker.worker_id)
        self.ledger.release_load(driver.key)
        driver.prefill_worker = driver.decode_worker = None

    # -- views --------------------------------------------------------------------------------

    def fleet_load(self) -> FleetLoad:
        """What a router reads from the ledger before it asks the policy."""
        workers = tuple(
            WorkerLoad(
                worker_id=worker.worker_id,
                epoch=worker.epoch,
                role=worker.role,
                outstanding_prefill_tokens=self.ledger.load_tokens(worker.worker_id),
                free_pages=worker.spec.total_pages - self.ledger.pages(worker.worker_id),
                total_pages=worker.spec.total_pages,
                is_draining=worker.is_draining,
            )
            for worker in self.workers.values()
        )
        pending = sum(driver.demand.num_pages for driver in self.in_phase(Phase.PREFILLED))
        return FleetLoad(workers, pending)

    def _ordered(self, belongs: Callable[[Driver], bool]) -> list[Driver]:
        chosen = [driver for driver in self.drivers.values() if belongs(driver)]
        return sorted(chosen, key=lambda driver: driver.request.order)
