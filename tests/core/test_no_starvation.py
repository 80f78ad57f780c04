"""Nobody waits for ever, though others keep coming: in a deployment, and on one hybrid worker."""

from itertools import count
from random import Random

import pytest
from tests.core.small_world import MASK, VOCABULARY, SmallWorld, WorkerSpec

from sangam_core.decoding import Commit, Decoding, Resume
from sangam_core.geometry import Geometry
from sangam_core.placement import PlacementPolicy, Role
from sangam_core.wire import BlockKey, BlockStart, KVSource, WireGeometry
from sangam_worker.block_state import BlockState, Stage, block_state_from
from sangam_worker.plan import Outcome, PassOutcome, Plan
from sangam_worker.scheduler import UNBOUNDED, Scheduler

BLOCK = 8
GEOMETRY = Geometry(prompt_tokens=24, num_blocks=3, block_length=BLOCK)
PASSES_PER_BLOCK = BLOCK
TAUS = [1, BLOCK - 1, BLOCK, BLOCK + 2, 4 * BLOCK, 100]


def block(request_id: str, arrival: float, *, cache: str = "dual", moved: bool) -> BlockState:
    """A fresh block, or (``moved``) one that was prefilled elsewhere."""
    start = BlockStart(
        key=BlockKey(request_id=request_id, block=0, attempt=1),
        worker_epoch="e",
        arrival_seconds=arrival,
        ids=(1,) * GEOMETRY.prompt_tokens + (MASK,) * GEOMETRY.mask_buffer_tokens,
        geometry=WireGeometry.of(GEOMETRY),
        decoding=Decoding(cache=cache),
        source=KVSource(worker_id="p", epoch="e", url="") if moved else None,
        resume=Resume(step=1, initial_masks=BLOCK) if moved else None,
    )
    return block_state_from(start, MASK, VOCABULARY)


def run(scheduler: Scheduler, plan: Plan) -> None:
    """An engine that commits one token a pass."""
    outcomes = tuple(
        PassOutcome(item.key, tuple(Commit(position=p, token=2) for p in item.masked[:1]))
        for item in plan.passes
    )
    scheduler.apply(Outcome(plan.iteration, outcomes))


def let_arrive(scheduler: Scheduler, state: BlockState) -> None:
    assert scheduler.reserve(state)
    scheduler.arrived(state.key)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("cache", ["dual", "prefix"])
@pytest.mark.parametrize("max_batch_blocks", [1, 2, 5, UNBOUNDED])
def test_a_prefill_is_admitted_though_younger_decodes_arrive_without_end(
    cache: str, tau: int, max_batch_blocks: int
) -> None:
    scheduler = Scheduler(
        mask_id=MASK, total_pages=60, tau_tokens=tau, max_batch_blocks=max_batch_blocks
    )
    arrivals = count(2)
    let_arrive(scheduler, block("first", 0.0, cache=cache, moved=True))
    prefill = block("prefill", 1.0, cache=cache, moved=False)
    scheduler.submit(prefill)
    # A quarter of tau at least is left to credit, or one block's decode ends and nothing runs.
    patience = 2 * PASSES_PER_BLOCK + 4 * GEOMETRY.total_tokens // tau
    for _ in range(patience):
        while len(scheduler.keys()) < 8:
            arrival = next(arrivals)
            let_arrive(scheduler, block(f"younger-{arrival}", arrival, cache=cache, moved=True))
        plan = scheduler.next_plan()
        assert plan is not None
        if prefill.stage is not Stage.WAITING:
            return
        run(scheduler, plan)
    pytest.fail(f"the prefill still waits after {patience} iterations")


@pytest.mark.parametrize("tau", TAUS)
def test_an_older_decode_joins_at_once_though_prefills_wait(tau: int) -> None:
    scheduler = Scheduler(mask_id=MASK, total_pages=60, tau_tokens=tau)
    for number in range(4):
        scheduler.submit(block(f"younger-{number}", 5.0 + number, moved=False))
    plan = scheduler.next_plan()
    assert plan is not None
    older = block("older", 1.0, moved=True)
    let_arrive(scheduler, older)
    run(scheduler, plan)
    assert scheduler.next_plan() is not None
    assert older.stage is Stage.DECODING


def test_an_older_decode_is_not_held_up_behind_a_younger_one() -> None:
    scheduler = Scheduler(mask_id=MASK, total_pages=60, tau_tokens=BLOCK)
    scheduler.submit(block("running", 0.0, moved=False))
    plan = scheduler.next_plan()
    assert plan is not None
    scheduler.submit(block("prefill", 2.0, moved=False))
    younger, older = block("younger", 3.0, moved=True), block("older", 1.0, moved=True)
    let_arrive(scheduler, younger)
    let_arrive(scheduler, older)
    run(scheduler, plan)
    assert scheduler.next_plan() is not None
    assert (older.stage, younger.stage) == (Stage.DECODING, Stage.PARKED)


def test_a_decode_that_holds_the_pages_of_the_waiting_prefill_joins() -> None:
    scheduler = Scheduler(mask_id=MASK, total_pages=GEOMETRY.num_pages, tau_tokens=1)
    decode = block("decode", 2.0, moved=True)
    let_arrive(scheduler, decode)
    scheduler.submit(block("prefill", 1.0, moved=False))
    assert scheduler.next_plan() is not None
    assert decode.stage is Stage.DECODING


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("cache", ["dual", "prefix"])
@pytest.mark.parametrize("roles", [[Role.COLOCATED], [Role.PREFILL, Role.COLOCATED]], ids=len)
def test_no_request_waits_for_ever_in_a_busy_deployment(
    roles: list[Role], cache: str, tau: int
) -> None:
    fleet = [WorkerSpec(f"{role}", role, 100, tau) for role in roles]
    world = SmallWorld(fleet, PlacementPolicy(theta_tokens=60), Random(tau))
    random = Random(tau)
    while world.now < 300:
        while len(world.unfinished) < 12:
            world.submit(random.randint(0, 40), random.randint(1, 2), cache=cache)
        world.tick()
        oldest = world.unfinished[0].request
        assert world.now - oldest.arrival_seconds < 150, oldest
    assert all(world.num_prefills[role] > 20 for role in roles), "both paths are used"
