"""Whole simulations: the same bytes again, nothing lost, queues as theory has them, time-outs."""

import random
from collections import Counter
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.small_world import MASK, SmallWorld, WorkerSpec
from tests.loadtest.simulator.builders import (
    EqualCommits,
    FlatCosts,
    a_plan,
    a_run,
    a_system,
    a_world,
)

from sangam_core.errors import ConfigurationError
from sangam_core.placement import PlacementPolicy, Role
from sangam_loadtest.arrivals import Arrivals
from sangam_loadtest.costs.model import cost_model
from sangam_loadtest.load import Due, Load, planned
from sangam_loadtest.simulator.commits import GeometricCommits
from sangam_loadtest.simulator.simulate import TIMEOUT, geometry_of
from sangam_loadtest.traces.request import TraceRequest
from sangam_loadtest.traces.source import TraceSpec

SPLITS = ["1C", "3C", "1P1D", "2P1D", "1P2C", "2P1C1D"]
COSTS = FlatCosts(0.7, 0.05, 0.003, 0.02, 0.01, 0.01)
REQUESTS = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=12
)


def a_load(num_requests: int, rate: float) -> list[Due]:
    return planned(Load(TraceSpec("sharegpt"), Arrivals(rate=rate), num_requests))


@pytest.mark.parametrize("split", ["3C", "2P1D", "2P1C"])
def test_the_same_simulation_gives_the_same_records(split: str) -> None:
    runs = [
        a_run(
            a_load(20, 4.0),
            a_system(split, tau=1024, theta_tokens=4096.0),
            costs=cost_model("h100", "llada-8b", "paper"),
            commits=GeometricCommits.calibrated(2.0),
            seed=seed,
            keeps_commits=True,
        )
        for seed in (0, 0, 1)
    ]
    lines = [[record.to_json() for record in run.records] for run in runs]
    assert lines[0] == lines[1]
    assert lines[0] != lines[2]
    assert [line.partition(",")[0] for line in lines[0]] == [
        line.partition(",")[0] for line in lines[2]
    ]


@settings(max_examples=40, deadline=None)
@given(
    requests=REQUESTS,
    split=st.sampled_from(SPLITS),
    tau=st.sampled_from([1, 64, 300, 10_000]),
    theta=st.sampled_from([1.0, 400.0, float("inf")]),
    total_pages=st.sampled_from([28, 60, 1000]),
    is_overflow_allowed=st.booleans(),
    is_batch_one=st.booleans(),
    tokens_a_pass=st.sampled_from([3, 8, 32]),
)
def test_every_request_is_answered_once_and_everything_is_free_again(
    requests: list[tuple[float, int, int]],
    split: str,
    tau: int,
    theta: float,
    total_pages: int,
    is_overflow_allowed: bool,
    is_batch_one: bool,
    tokens_a_pass: int,
) -> None:
    plan = a_plan(*sorted(requests))
    system = a_system(
        split,
        tau=tau,
        theta_tokens=theta,
        total_pages=total_pages,
        is_overflow_allowed=is_overflow_allowed,
        is_batch_one=is_batch_one,
    )
    world = a_world(plan, system, costs=COSTS, commits=EqualCommits(tokens_a_pass)).run()
    assert sorted(record.index for record in world.records) == list(range(len(plan)))
    for record in world.records:
        due = plan[record.index]
        assert record.error is None
        assert record.num_blocks == -(-due.request.output_tokens // 32)
        assert record.num_blocks == len(record.commit_counts) == len(record.placements)
        assert record.num_steps == sum(map(len, record.commit_counts))
        committed = list(map(sum, record.commit_counts))
        assert committed[:-1] == [32] * (record.num_blocks - 1)
        last = due.request.output_tokens - 32 * (record.num_blocks - 1)
        assert last <= committed[-1] < last + tokens_a_pass
        assert record.latency_seconds >= record.num_blocks * COSTS.prefill
    assert_everything_is_free(world, total_pages)
    assert_roles_hold(world, system.split.roles())


def assert_everything_is_free(world: object, total_pages: int) -> None:
    driver = world.driver
    assert (driver.num_under_way, driver.fleet.num_waiting) == (0, (0, 0))
    for load, worker in zip(driver.fleet.loads, driver.workers, strict=True):
        assert (load.outstanding_prefill_tokens, load.free_pages) == (0, total_pages)
        assert worker.scheduler.is_empty
        assert worker.scheduler.pages.num_free == total_pages


def assert_roles_hold(world: object, roles: list[Role]) -> None:
    num_passes: Counter[str] = Counter()
    for item in world.iterations:
        role = roles[item.worker]
        num_passes["prefills"] += item.batch.num_prefills
        num_passes["decodes"] += item.batch.num_decodes
        assert role.can_prefill or not item.batch.num_prefills
        assert role.can_decode or not item.batch.num_decodes
    assert num_passes["prefills"] == sum(record.num_blocks for record in world.records)
    assert num_passes.total() == sum(record.num_steps for record in world.records)


def a_queue(rate: float, num_requests: int) -> list[Due]:
    """Requests of one pass each, whose times between arrivals are exponential."""
    rng = random.Random(5)
    at = 0.0
    plan = []
    for index in range(num_requests):
        plan.append(Due(index, at, TraceRequest(32, 32)))
        at += rng.expovariate(rate)
    return plan


def test_one_worker_waits_as_lindleys_recursion_has_it() -> None:
    plan = a_queue(rate=0.8, num_requests=400)
    result = a_run(plan, a_system("1C", is_batch_one=True), commits=EqualCommits(32))
    free_at = 0.0
    for due, record in zip(plan, result.records, strict=True):
        begins = max(free_at, due.at_seconds)
        free_at = begins + 1.0
        assert record.queueing_seconds == pytest.approx(begins - due.at_seconds, abs=1e-9)
    assert result.virtual_seconds == pytest.approx(free_at)
    assert result.busy_shares[0] == pytest.approx(400 / free_at)


@pytest.mark.parametrize("load", [0.4, 0.7])
def test_the_mean_wait_is_pollaczeks_and_khinchines(load: float) -> None:
    """M/D/1 with a service of 1 s: rho / (2 (1 - rho))."""
    plan = a_queue(rate=load, num_requests=6000)
    result = a_run(plan, a_system("1C", is_batch_one=True), commits=EqualCommits(32))
    waited = mean(record.queueing_seconds for record in result.records)
    assert waited == pytest.approx(load / (2 * (1 - load)), rel=0.1)


def test_batching_serves_what_one_at_a_time_cannot() -> None:
    plan = a_queue(rate=4.0, num_requests=200)
    alone, together = (
        a_run(plan, a_system("1C", tau=640, is_batch_one=is_batch_one))
        for is_batch_one in (True, False)
    )
    assert alone.virtual_seconds >= 200 * (1.0 + 3 * 0.25)
    assert together.virtual_seconds < 0.5 * alone.virtual_seconds


@pytest.mark.parametrize("split", [(1, 0, 0), (2, 1, 0), (1, 1, 1)], ids=["1C", "2P1C", "1P1C1D"])
@pytest.mark.parametrize("seed", range(3))
def test_the_small_world_runs_the_same_blocks_in_the_same_places(
    split: tuple[int, int, int], seed: int
) -> None:
    """Another driver of the same brains, without time: as many blocks, of the same requests."""
    rng = random.Random(seed)
    requests = [(rng.randint(1, 40), rng.randint(1, 5), rng.randint(0, 39)) for _ in range(10)]
    colocated, prefill, decode = split
    roles = [Role.PREFILL] * prefill + [Role.COLOCATED] * colocated + [Role.DECODE] * decode
    policy = PlacementPolicy(is_overflow_allowed=False)

    small = SmallWorld(
        [WorkerSpec(f"worker-{n}", role, 40, 64) for n, role in enumerate(roles)], policy, rng
    )
    ends = [min(eos, 8 * blocks - 1) for _, blocks, eos in requests]
    drivers = [
        small.submit(prompt, blocks, eos_offset=end)
        for (prompt, blocks, _), end in zip(requests, ends, strict=True)
    ]
    for _ in range(5000):
        small.tick()
    assert not small.unfinished

    text = f"{prefill}P{colocated}C{decode}D"
    system = a_system(text, total_pages=40, block_length=8, is_overflow_allowed=False)
    plan = [
        Due(number, 0.0, TraceRequest(prompt, end + 1))
        for number, ((prompt, _, _), end) in enumerate(zip(requests, ends, strict=True))
    ]
    world = a_world(plan, system, commits=EqualCommits(2)).run()
    by_index = sorted(world.records, key=lambda record: record.index)
    for driver, record in zip(drivers, by_index, strict=True):
        start = driver.request.geometry.prompt_tokens
        num_written = sum(token != MASK for token in driver.ids[start:])
        assert record.num_blocks == driver.request.block + 1 == -(-num_written // 8)
    placed = Counter(
        roles[int(workers[0].removeprefix("worker-"))]
        for record in by_index
        for workers in record.placements
    )
    assert placed == small.num_prefills


def test_a_worker_runs_its_largest_batch_and_no_more() -> None:
    def largest(**bound: int) -> int:
        sizes: list[int] = []
        a_run(
            a_plan(*[(0.0, 32, 32)] * 6),
            a_system(tau=1024, **bound),
            watch=lambda it: sizes.append(it.batch.num_decodes + it.batch.num_prefills),
        )
        return max(sizes)

    assert largest() == 6
    assert largest(max_batch_blocks=4) == 4


def test_who_is_under_way_at_a_time_out_has_failed() -> None:
    plan = a_plan((0.0, 32, 32), (0.0, 32, 32), (0.0, 32, 32), (2.0, 32, 32))
    result = a_run(plan, a_system("1C"), commits=EqualCommits(32), timeout_seconds=0.5)
    assert [record.error for record in result.records] == [None, None, TIMEOUT, TIMEOUT]
    assert [record.latency_seconds for record in result.records] == [1.0, 2.0, None, None]
    assert result.records[2].prompt_tokens == 32
    assert result.virtual_seconds <= 2.5
    assert result.busy_shares == [1.0]


def test_an_answer_in_time_is_no_time_out() -> None:
    result = a_run(a_plan(), a_system("2C"), commits=EqualCommits(32), timeout_seconds=1.0)
    assert [record.error for record in result.records] == [None, None]


def test_a_time_out_before_anything_ran_gives_no_busy_workers() -> None:
    costs = FlatCosts(host_seconds_per_request=1.0)
    result = a_run(a_plan((0.0, 32, 32)), a_system("1C"), costs=costs, timeout_seconds=0.5)
    assert (result.records[0].error, result.busy_shares) == (TIMEOUT, [0.0])


def test_busy_shares_are_of_each_worker() -> None:
    plan = a_plan((0.0, 32, 32), (3.0, 32, 32))
    result = a_run(plan, a_system("1P1D"), costs=FlatCosts(decode=1 / 3))
    assert result.virtual_seconds == pytest.approx(5.0)
    assert result.busy_shares == pytest.approx([2 / 5, 2 / 5])
    assert result.num_iterations == 8


def test_progress_is_told_now_and_then() -> None:
    told: list[int] = []
    a_run(a_plan(*[(0.0, 32, 32)] * 250), a_system("8C", tau=1024), progress=told.append)
    assert told == [100, 200]


@pytest.mark.parametrize(
    ("request_", "changes", "told"),
    [
        (TraceRequest(0, 32), {}, "use one of lengths"),
        (TraceRequest(32, 32, is_exact_output=False), {}, "where the model ends them"),
        (TraceRequest(32, 65), {"mask_buffer_tokens": 64}, r"exceeds L = 64; .*--max-output 64"),
        (TraceRequest(640, 32), {"total_pages": 41}, r"672 tokens needs 42 pages.*--max-total"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(
    request_: TraceRequest, changes: dict[str, int], told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        a_run([Due(0, 0.0, request_)], a_system(**changes))


def test_a_mask_buffer_is_the_answers_own_or_everybodys() -> None:
    assert geometry_of(TraceRequest(10, 33), a_system()).mask_buffer_tokens == 64
    fixed = a_system(mask_buffer_tokens=1024)
    assert geometry_of(TraceRequest(10, 33), fixed).mask_buffer_tokens == 1024
