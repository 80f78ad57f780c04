"""Builders for the ledger's tests: workers that publish leases, routers, requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from sangam_core.lease import LedgerKeys, WorkerLease
from sangam_core.placement import Demand, PlacementPolicy, Role, WorkerLoad
from sangam_core.wire import BlockKey
from sangam_router.fleet import FleetView
from sangam_router.ledger import FleetSnapshot, Ledger, Refused, Reservation, Ticket
from sangam_router.ledger.audit import Audit
from sangam_router.ledger.placing import Placer
from sangam_router.ledger.scripts import Client

MODEL = "small"
DEADLINE_SECONDS = 20.0


def lease(worker_id: str = "w", **changes: Any) -> WorkerLease:
    """A colocated worker's lease with 100 pages."""
    role = changes.pop("role", Role.COLOCATED)
    total_pages = changes.pop("total_pages", 100)
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "epoch": f"{worker_id}-1",
        "role": role,
        "boot_role": role,
        "url": f"http://{worker_id}:1",
        "model": MODEL,
        "total_pages": total_pages,
        "free_pages": total_pages,
        "page_tokens": 16,
        "block_length": 32,
        "max_sequence_tokens": 4096,
    }
    return WorkerLease(**(fields | changes))


def ticket(request_id: str = "r", arrival_seconds: float = 1.0) -> Ticket:
    return Ticket(arrival_seconds, request_id)


def demand(request_id: str = "r", num_pages: int = 4, **changes: Any) -> Demand:
    return Demand(request_id, changes.pop("cost_tokens", 16 * num_pages), num_pages, **changes)


def block(request_id: str = "r", number: int = 0, attempt: int = 1) -> BlockKey:
    return BlockKey(request_id=request_id, block=number, attempt=attempt)


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for a condition of Redis or of the ledger; fails after a deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not await condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.005)


class World:
    """One deployment: its namespace in Redis, its routers."""

    def __init__(self, redis: Client, namespace: str) -> None:
        self.redis = redis
        self.namespace = namespace
        self.keys = LedgerKeys(namespace)
        self._routers: list[Ledger] = []

    def router(self, router_id: str = "a", **settings: Any) -> Ledger:
        """A router's ledger (its background work is not running)."""
        ledger = Ledger(
            settings.pop("redis", self.redis),
            namespace=self.namespace,
            router_id=router_id,
            model=settings.pop("model", MODEL),
            counts_blocks=settings.pop("counts_blocks", True),
            lease_seconds=settings.pop("lease_seconds", 10.0),
            poll_seconds=settings.pop("poll_seconds", 1.0),
            **settings,
        )
        self._routers.append(ledger)
        return ledger

    async def publish(self, *leases: WorkerLease, seconds: float = 600.0) -> None:
        """What a worker's heartbeat does."""
        for each in leases:
            key = self.keys.worker(each.worker_id)
            await self.redis.hset(key, mapping=each.fields())
            await self.redis.pexpire(key, round(seconds * 1000))
            await self.redis.sadd(self.keys.workers, each.worker_id)

    async def lose(self, worker_id: str) -> None:
        """A worker's lease expires."""
        await self.redis.delete(self.keys.worker(worker_id))

    async def expire(self, ledger: Ledger) -> None:
        """A router's lease expires."""
        await self.redis.delete(f"{self.keys.prefix}router:{ledger.owner}")

    async def empty(self) -> None:
        """What a Redis that restarts without persistence has lost: everything."""
        keys = [key async for key in self.redis.scan_iter(match=f"{self.keys.prefix}*")]
        if keys:
            await self.redis.delete(*keys)

    async def age(self, seconds: float) -> None:
        """Let the data be older: as if Redis had been emptied longer ago."""
        key = f"{self.keys.prefix}born"
        await self.redis.set(key, int(await self.redis.get(key)) - round(seconds))

    async def audit(self) -> Audit:
        """The ledger as a router that had nothing to do with it sees it."""
        return await self.router("auditor").audit()

    async def is_empty(self) -> bool:
        """Whether nothing is reserved and nobody waits; fails where counters have drifted."""
        found = await self.audit()
        assert not found.differences, found.differences
        return not await self.leftovers()

    async def leftovers(self) -> list[str]:
        """Keys of records, counters and lines: Redis has none of them when all sums are 0."""
        kinds = ("records:", "line:", "load", "pages", "blocks", "pending_pages")
        prefix = self.keys.prefix
        keys = [key async for key in self.redis.scan_iter(match=f"{prefix}*")]
        return sorted(key for key in keys if key.removeprefix(prefix).startswith(kinds))

    async def aclose(self) -> None:
        for ledger in self._routers:
            await ledger.aclose()
        await self.empty()


def placer(ledger: Ledger, policy: PlacementPolicy | None = None, **settings: Any) -> Placer:
    policy = policy or PlacementPolicy()
    fleet = FleetView(ledger, policy=policy, worker_lease_seconds=5.0)
    return Placer(ledger, fleet, policy, patience_seconds=settings.pop("patience_seconds", 5.0))


def load_of(snapshot: FleetSnapshot, worker_id: str = "w") -> WorkerLoad:
    return next(w for w in snapshot.fleet.workers if w.worker_id == worker_id)


async def reserve(ledger: Ledger, request_id: str = "r", **changes: Any) -> Reservation | Refused:
    """Look at the fleet and reserve a prefill on a worker, whatever the policy would say."""
    worker = load_of(await ledger.snapshot(), changes.pop("worker_id", "w"))
    return await ledger.reserve_prefill(
        ticket(request_id, changes.pop("arrival_seconds", 1.0)),
        block(request_id),
        demand(request_id, **changes),
        worker,
    )


async def reserved(ledger: Ledger, request_id: str = "r", **changes: Any) -> Reservation:
    got = await reserve(ledger, request_id, **changes)
    assert isinstance(got, Reservation), got
    return got
