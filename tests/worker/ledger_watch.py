"""What a router would see of workers in Redis, for tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from tests.worker.harness import DEADLINE_SECONDS, eventually

from sangam_core.lease import LedgerKeys, WorkerLease
from sangam_router.local.redis_server import RedisServer

QUICK = {"heartbeat_seconds": 0.05, "lease_seconds": 0.5}
"""Settings under which a test need not wait for leases."""


class Watch:
    """Reads leases and wake-ups of one namespace."""

    def __init__(self, redis: Any, keys: LedgerKeys, pubsub: PubSub) -> None:
        self.redis = redis
        self.keys = keys
        self._pubsub = pubsub

    async def lease(self, worker_id: str) -> WorkerLease | None:
        """The worker's lease, if it has one."""
        fields = await self.redis.hgetall(self.keys.worker(worker_id))
        if not fields:
            return None
        lease = WorkerLease.from_fields(fields)
        assert lease is not None, f"the lease is torn: {fields}"
        return lease

    async def lease_once_held(self, worker_id: str) -> WorkerLease:
        """Wait for the worker's lease."""

        async def is_there() -> bool:
            return await self.lease(worker_id) is not None

        await eventually(is_there)
        lease = await self.lease(worker_id)
        assert lease is not None
        return lease

    async def woken(self) -> str:
        """Wait for the next wake-up; what it says."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                message = await self._pubsub.get_message(
                    ignore_subscribe_messages=True, timeout=1.0
                )
                if message is not None:
                    return str(message["data"])

    async def forget_wakeups(self) -> None:
        """Drop the wake-ups that have come so far."""
        while await self._pubsub.get_message(ignore_subscribe_messages=True, timeout=0.0):
            pass

    async def hear_wakeups(self) -> None:
        """Subscribe, again after the server was started anew."""
        await self._pubsub.subscribe(self.keys.wake_channel)


@asynccontextmanager
async def a_watch(server: RedisServer, namespace: str = "sangam") -> AsyncIterator[Watch]:
    """A connection that listens to the wake channel from now on."""
    keys = LedgerKeys(namespace)
    async with (
        Redis.from_url(server.url, decode_responses=True) as redis,
        redis.pubsub() as pubsub,
    ):
        watch = Watch(redis, keys, pubsub)
        await watch.hear_wakeups()
        yield watch
