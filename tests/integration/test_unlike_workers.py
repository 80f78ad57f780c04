"""Workers that differ in what they take serve together; none refuses a block.

Short requests go to any of them, long ones to those that take them, also while one of these
changes its role; what none takes is refused at once, with the numbers. KV moves only between those
whose KV is alike.
"""

import asyncio
from pathlib import Path

import httpx
import openai
import pytest
from tests.integration.cluster import RunningCluster, running_cluster, until
from tests.integration.load import Clients, accuracy, differences, questions

from sangam_core.placement import Role
from sangam_router.local.roles import RoleCounts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SHORT_TOKENS = 256
LONG_TOKENS = 1024
"""The small model's own."""

LONG_ANSWER = 512
"""``max_tokens`` of a request that the short worker does not take."""

POOL_PAGES = "160"
"""Room for several long blocks, so that the long workers would get everything by free pages."""


async def num_refusals(cluster: RunningCluster, *codes: str) -> float:
    """Blocks that workers did not take, for these reasons (any reason: none given)."""
    total = 0.0
    for place in cluster.local.workers:
        found = (await cluster.metrics(place)).get("sangam_worker_refusals_total", {})
        total += sum(n for labels, n in found.items() if not codes or dict(labels)["code"] in codes)
    return total


async def num_blocks(cluster: RunningCluster) -> list[float]:
    """Blocks that each worker completed."""
    found = []
    for place in cluster.local.workers:
        outcomes = (await cluster.metrics(place)).get("sangam_worker_block_outcomes_total", {})
        found.append(sum(n for labels, n in outcomes.items()))
    return found


async def test_requests_of_every_length_are_served_by_workers_that_differ_in_theirs(
    tmp_path: Path,
) -> None:
    asked = questions(16)
    async with (
        running_cluster(
            tmp_path,
            roles=RoleCounts(colocated=3),
            worker_env={"SANGAM_TOTAL_PAGES": POOL_PAGES},
            env_by_worker={"worker-1": {"SANGAM_MAX_SEQUENCE_TOKENS": str(SHORT_TOKENS)}},
        ) as cluster,
        Clients(cluster) as clients,
    ):

        async def ask_both() -> tuple[list[str], list[str]]:
            (short, _), (long, _) = await asyncio.gather(
                clients.ask_all(asked), clients.ask_all(asked, max_tokens=LONG_ANSWER)
            )
            return short, long

        short_before, long_before = await ask_both()
        assert await num_refusals(cluster) == 0
        assert all(await num_blocks(cluster)), "each has served"
        assert await cluster.total("sangam_retries_total") == 0

        switched = asyncio.Event()

        async def switch() -> None:
            long_worker = cluster.local.workers[0]
            for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED):
                await cluster.desire_role(long_worker, role)
                await cluster.has_role(long_worker, role)
            switched.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(switch())
            while not switched.is_set():
                short, long = await ask_both()
                assert not differences(asked, short_before, short)
                assert not differences(asked, long_before, long)

        # While roles change, a fleet view may be stale; a length never is.
        assert await num_refusals(cluster, "never_fits", "no_pages") == 0
        assert await cluster.total("sangam_requests_total", outcome="InvalidRequest") == 0
        await cluster.assert_idle()


async def test_blocks_move_only_between_workers_whose_kv_is_alike(tmp_path: Path) -> None:
    asked = questions(8)
    async with (
        running_cluster(
            tmp_path,
            roles=RoleCounts(prefill=1, decode=2),
            num_routers=1,
            env_by_worker={"worker-2": {"SANGAM_DTYPE": "bfloat16", "SANGAM_TOTAL_PAGES": "4096"}},
        ) as cluster,
        Clients(cluster) as clients,
    ):
        answers, _ = await clients.ask_all(asked)
        assert accuracy(asked, answers) >= 0.5
        assert await cluster.total("sangam_retries_total") == 0
        assert await num_refusals(cluster) == 0
        *_, other = await num_blocks(cluster)
        assert other == 0
        assert "1 with 'bfloat16 by gloo'" in (await cluster.admin("/admin/fleet"))["remark"]
        await cluster.assert_idle()


async def test_the_length_that_is_offered_is_what_some_worker_takes(tmp_path: Path) -> None:
    async with (
        running_cluster(
            tmp_path,
            roles=RoleCounts(colocated=2),
            num_routers=1,
            env_by_worker={"worker-1": {"SANGAM_MAX_SEQUENCE_TOKENS": str(SHORT_TOKENS)}},
        ) as cluster,
        Clients(cluster) as clients,
    ):
        assert await offered_tokens(cluster) == LONG_TOKENS
        fleet = await cluster.admin("/admin/fleet")
        assert {each["worker_id"]: each["max_sequence_tokens"] for each in fleet["workers"]} == {
            "worker-0": LONG_TOKENS,
            "worker-1": SHORT_TOKENS,
        }
        # With the long one as a prefill worker, nobody could decode what only it prefills.
        await cluster.desire_role(cluster.worker(0), Role.PREFILL)
        await cluster.has_role(cluster.worker(0), Role.PREFILL)

        async def offers_less() -> str:
            offered = await offered_tokens(cluster)
            return "" if offered == SHORT_TOKENS else f"{offered} tokens are offered"

        await until(offers_less)
        with pytest.raises(openai.BadRequestError) as caught:
            await clients.ask("What is 17 + 25?", max_tokens=LONG_ANSWER)
        assert f"exceed the {SHORT_TOKENS} tokens that this server's workers take" in str(
            caught.value
        )
        assert f"(the model {LONG_TOKENS})" in str(caught.value)
        assert await clients.ask("What is 17 + 25?", max_tokens=64)
        assert await num_refusals(cluster, "never_fits") == 0


async def offered_tokens(cluster: RunningCluster) -> int:
    """``max_model_len``."""
    async with httpx.AsyncClient() as client:
        models = (await client.get(f"{cluster.base_urls[0]}/models")).json()
    length: int = models["data"][0]["max_model_len"]
    return length
