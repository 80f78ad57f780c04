"""Processes die in the middle of a run, and no client notices more than a retry."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
import pytest_asyncio
from tests.integration.cluster import RETURN_SECONDS, RunningCluster, running_cluster, until
from tests.integration.knobs import NUM_QUESTIONS, NUM_REDIS_LOSSES, NUM_WORKER_KILLS, SEED
from tests.integration.load import Clients, Question, differences, questions

from sangam_core.placement import Role
from sangam_router.local.processes import ProcessState, SupervisedProcess
from sangam_router.local.roles import RoleCounts

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

ROLES = RoleCounts(prefill=1, decode=1, colocated=2)
"""Every path there is, and two workers that can do it all: one may die."""

THETA_TOKENS = 300

Disturbance = Callable[[], Awaitable[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("failures")
    async with running_cluster(folder, roles=ROLES, theta_tokens=THETA_TOKENS) as running:
        yield running


@pytest.fixture(scope="module")
def asked() -> Sequence[Question]:
    return questions(NUM_QUESTIONS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(cluster: RunningCluster, asked: Sequence[Question]) -> list[str]:
    async with Clients(cluster) as clients:
        answers, _ = await clients.ask_all(asked)
    return answers


async def same_answers_while(
    disturb: Disturbance,
    cluster: RunningCluster,
    asked: Sequence[Question],
    undisturbed: Sequence[str],
    *,
    retries_other_router: bool = False,
) -> int:
    """Ask over and over until ``disturb`` is done; returns how often a client had to retry."""
    num_retries = 0
    disturbing = asyncio.create_task(disturb())
    try:
        async with Clients(cluster) as clients:
            while not disturbing.done():
                answers, tally = await clients.ask_all(
                    asked, retries_other_router=retries_other_router
                )
                assert not differences(asked, undisturbed, answers)
                num_retries += tally.num_retries
        await disturbing
    finally:
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
    await cluster.assert_idle()
    return num_retries


def num_worker_restarts(cluster: RunningCluster) -> int:
    return sum(place.process.num_restarts for place in cluster.local.workers)


async def killable(cluster: RunningCluster) -> list[int]:
    """Workers whose death leaves a ready one that does it all; waits until there is one."""
    workers = cluster.local.workers
    found: list[int] = []
    while not found:
        ready = [i for i, w in enumerate(workers) if w.process.state is ProcessState.READY]
        doing_all = {i for i in ready if workers[i].role is Role.COLOCATED}
        found = [i for i in ready if doing_all - {i}]
        await asyncio.sleep(0.05)
    return found


async def left(process: SupervisedProcess) -> None:
    """Wait until a killed process has been noticed to be gone."""

    async def objection() -> str:
        return "ready" if process.state is ProcessState.READY else ""

    await until(objection, 5.0)


async def test_workers_killed_at_random_moments_change_no_answer(
    cluster: RunningCluster, asked: Sequence[Question], undisturbed: Sequence[str]
) -> None:
    chance = random.Random(f"kills {SEED}")
    restarts_before = num_worker_restarts(cluster)
    retries_before = await cluster.total("sangam_retries_total")

    async def kill_workers() -> None:
        for _ in range(NUM_WORKER_KILLS):
            await asyncio.sleep(chance.uniform(0.1, 1.0))
            victim = cluster.worker(chance.choice(await killable(cluster))).process
            victim.kill()
            await left(victim)
        for place in cluster.local.workers:
            await place.process.wait_ready(RETURN_SECONDS)

    await same_answers_while(kill_workers, cluster, asked, undisturbed)
    assert num_worker_restarts(cluster) == restarts_before + NUM_WORKER_KILLS
    assert await cluster.total("sangam_retries_total") > retries_before


async def test_clients_of_a_killed_router_get_the_same_answer_from_the_other(
    cluster: RunningCluster, asked: Sequence[Question], undisturbed: Sequence[str]
) -> None:
    async def kill_a_router() -> None:
        await asyncio.sleep(0.5)
        await cluster.kill_and_return(cluster.router(0).process)

    num_retries = await same_answers_while(
        kill_a_router, cluster, asked, undisturbed, retries_other_router=True
    )
    assert num_retries > 0


async def test_a_redis_that_comes_back_empty_costs_no_request(
    cluster: RunningCluster, asked: Sequence[Question], undisturbed: Sequence[str]
) -> None:
    chance = random.Random(f"losses {SEED}")

    async def lose_redis() -> None:
        assert cluster.local.redis is not None
        for _ in range(NUM_REDIS_LOSSES):
            # Between two losses workers renew their leases, else requests wait in vain for 20 s.
            await asyncio.sleep(chance.uniform(1.5, 4.0))
            await cluster.kill_and_return(cluster.local.redis)

    await same_answers_while(lose_redis, cluster, asked, undisturbed)
