"""Stub workers in a real Redis: what their heartbeats would publish."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from redis.asyncio import Redis
from tests.router.stub_worker import StubWorker

from sangam_core.lease import LedgerKeys, WorkerLease


async def until(condition: Callable[[], Awaitable[bool]], deadline_seconds: float = 15.0) -> None:
    """Poll for what nobody announces: the state of Redis, or of another process."""
    async with asyncio.timeout(deadline_seconds):
        while not await condition():  # noqa: ASYNC110 - nobody sets an event
            await asyncio.sleep(0.01)


class Fleet:
    """Leases in one namespace. Use as an ``async with``."""

    def __init__(self, url: str, model: str = "small") -> None:
        self.url = url
        self.namespace = f"test-{uuid.uuid4().hex[:8]}"
        self.keys = LedgerKeys(self.namespace)
        self.redis = Redis.from_url(url, decode_responses=True)
        self.model = model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.redis.aclose()

    async def publish(self, *workers: StubWorker, **changes: Any) -> None:
        """Write the workers' leases, which then stay for an hour."""
        for worker in workers:
            fields: dict[str, Any] = {
                "worker_id": worker.worker_id,
                "epoch": worker.epoch,
                "role": worker.role,
                "boot_role": worker.role,
                "url": worker.url,
                "model": self.model,
                "total_pages": 100,
                "free_pages": 100,
                "page_tokens": 16,
                "block_length": 32,
                "max_sequence_tokens": 1024,
                "carried_tokens": 7,
                "tau_tokens": 1024,
            }
            lease = WorkerLease(**(fields | changes))
            key = self.keys.worker(worker.worker_id)
            await self.redis.hset(key, mapping=lease.fields())
            await self.redis.expire(key, 3600)
            await self.redis.sadd(self.keys.workers, worker.worker_id)
            await self.redis.publish(self.keys.wake_channel, "worker")

    async def lose(self, worker: StubWorker) -> None:
        """A worker's lease expires."""
        await self.redis.delete(self.keys.worker(worker.worker_id))

    async def empty(self) -> None:
        """What a Redis that restarts without persistence has lost: everything."""
        keys = [key async for key in self.redis.scan_iter(f"{self.keys.prefix}*")]
        await self.redis.delete(*keys)

    async def is_empty(self) -> bool:
        """Whether nothing is held and nobody waits."""
        return not await self.counters()

    async def counters(self) -> dict[str, Any]:
        """What Redis counts as held; empty when nothing is."""
        found: dict[str, Any] = {}
        for name in ("load", "pages", "blocks", "pending_pages"):
            found[name] = await self.redis.hgetall(self.keys.prefix + name)
        lines = [key async for key in self.redis.scan_iter(f"{self.keys.prefix}line:*")]
        found["lines"] = lines
        return {name: value for name, value in found.items() if value}
