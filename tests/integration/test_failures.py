"""Processes die in the middle of a run, and no client notices more than a retry."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.integration.cluster import RunningCluster, running_cluster
from tests.integration.knobs import NUM_QUESTIONS, NUM_WORKER_KILLS, SEED
from tests.integration.load import Clients, differences, questions

from sangam_router.local.processes import ProcessState
from sangam_router.local.roles import RoleCounts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ROLES = RoleCounts(prefill=1, decode=1, colocated=2)

Disturbance = Callable[[RunningCluster], Awaitable[None]]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[RunningCluster]:
    async with running_cluster(tmp_path, roles=ROLES, theta_tokens=300) as running:
        yield running


async def same_answers_while(
    cluster: RunningCluster, disturb: Disturbance, *, retries_other_router: bool = False
) -> int:
    """Ask over and over until ``disturb`` is done; returns how often a client had to retry."""
    asked = questions(NUM_QUESTIONS)
    num_retries = 0
    async with Clients(cluster) as clients:
        undisturbed, _ = await clients.ask_all(asked)
        disturbing = asyncio.create_task(disturb(cluster))
        try:
            while True:
                answers, tally = await clients.ask_all(
                    asked, retries_other_router=retries_other_router
                )
                assert not differences(asked, undisturbed, answers)
                num_retries += tally.num_retries
                if disturbing.done():
                    await disturbing
                    break
        finally:
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
    await cluster.assert_idle()
    return num_retries


async def kill_workers(cluster: RunningCluster) -> None:
    """``kill -9`` at random moments; one other worker that does it all stays at a time."""
    chance = random.Random(f"kills {SEED}")
    for _ in range(NUM_WORKER_KILLS):
        await asyncio.sleep(chance.uniform(0.1, 1.0))
        victim = chance.choice(await killable(cluster))
        await cluster.kill(cluster.worker(victim).process)


async def killable(cluster: RunningCluster) -> list[int]:
    """Workers whose death leaves a ready colocated one; waits until there is one."""
    found: list[int] = []
    while not found:
        ready = [
            index
            for index, place in enumerate(cluster.local.workers)
            if place.process.state is ProcessState.READY and place.process.pid is not None
        ]
        doing_all = [i for i in ready if cluster.worker(i).role == "colocated"]
        found = [i for i in ready if set(doing_all) - {i}]
        await asyncio.sleep(0.05)
    return found


async def test_workers_killed_at_random_moments_change_no_answer(
    cluster: RunningCluster,
) -> None:
    await same_answers_while(cluster, kill_workers)
    assert sum(p.process.num_restarts for p in cluster.local.workers) == NUM_WORKER_KILLS
    assert await cluster.total("sangam_retries_total") > 0


async def test_clients_of_a_killed_router_get_the_same_answer_from_the_other(
    cluster: RunningCluster,
) -> None:
    async def kill_a_router(cluster: RunningCluster) -> None:
        await asyncio.sleep(0.5)
        await cluster.kill_and_return(cluster.router(0).process)

    num_retries = await same_answers_while(cluster, kill_a_router, retries_other_router=True)
    assert num_retries > 0


async def test_a_redis_that_comes_back_empty_costs_no_request(cluster: RunningCluster) -> None:
    async def lose_redis(cluster: RunningCluster) -> None:
        await asyncio.sleep(0.5)
        assert cluster.local.redis is not None
        await cluster.kill_and_return(cluster.local.redis)

    await same_answers_while(cluster, lose_redis)
