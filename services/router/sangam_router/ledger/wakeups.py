"""Listens on the wake channel and signals the waiters that should look again.

One subscription a router, however many wait. Messages: ``head`` names the routers of the heads
of the two lines (``lua/common.lua``); anything else is news of the fleet (a worker came, went or
drains; somebody was reaped) and concerns everyone. A subscription that breaks is made again;
whatever was missed is made up for by looking once after every (re)subscription, and by the slow
poll.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import structlog
from redis import exceptions
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import RedisCluster

from sangam_router.ledger.records import UNIT_SEPARATOR, Line
from sangam_router.ledger.scripts import Client
from sangam_router.ledger.tasks import raise_if_cancelled
from sangam_router.ledger.waiting import WaitingRoom

_log = structlog.get_logger(__name__)

_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 5.0


class Calls:
    """Whom a message concerns, among the waiters of one router.

    Args:
        owner: the router's name in Redis.
        on_news: called on news of the fleet, and when messages may have been missed.
    """

    def __init__(
        self, owner: str, rooms: Mapping[Line, WaitingRoom], on_news: Callable[[], None]
    ) -> None:
        self._owner = owner
        self._rooms = rooms
        self._on_news = on_news

    def heard(self, message: str) -> None:
        """Signal whom a message concerns."""
        kind, *heads = message.split(UNIT_SEPARATOR)
        if kind != "head" or len(heads) != len(Line):
            self.news()
            return
        for line, owner in zip(Line, heads, strict=True):
            if owner == self._owner:
                self._rooms[line].signal_oldest()

    def news(self) -> None:
        """Anything may have happened: the fleet is looked at, and the oldest waiters look."""
        self._on_news()
        self.poll()

    def poll(self) -> None:
        """The oldest waiters look."""
        for room in self._rooms.values():
            room.signal_oldest()


class Wakeups:
    """The wake channel of one namespace, for one router.

    Args:
        poll_seconds: how often the oldest waiters look without having been called.
        probe_seconds: silence after which the server is asked for a sign of life; it is given up
            after as much more.
    """

    def __init__(
        self,
        redis: Client,
        channel: str,
        calls: Calls,
        *,
        poll_seconds: float,
        probe_seconds: float = 10.0,
    ) -> None:
        self._redis = redis
        self._channel = channel
        self._calls = calls
        self._poll_seconds = poll_seconds
        self._probe_seconds = probe_seconds

    async def run(self) -> None:
        """Listen and poll until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll(), name="ledger poll")
            group.create_task(self._listen(), name="ledger wake-ups")

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            self._calls.poll()

    async def _listen(self) -> None:
        backoff_seconds = _FIRST_BACKOFF_SECONDS
        while True:
            try:
                if isinstance(self._redis, RedisCluster):
                    await self._redis.initialize()  # its pubsub looks the node up without
                async with contextlib.aclosing(self._redis.pubsub()) as pubsub:
                    await pubsub.subscribe(self._channel)
                    async for message in self._messages(pubsub):
                        backoff_seconds = _FIRST_BACKOFF_SECONDS
                        if message["type"] == "subscribe":
                            self._calls.news()  # only from here on nothing is missed
                        elif message["type"] == "message":
                            self._calls.heard(message["data"])
            except Exception as error:  # noqa: BLE001 - whatever breaks it, it is made again
                raise_if_cancelled()
                _log.info("subscription to wake-ups lost", error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(backoff_seconds)
                backoff_seconds = min(2 * backoff_seconds, _LONGEST_BACKOFF_SECONDS)

    async def _messages(self, pubsub: PubSub) -> AsyncIterator[dict[str, Any]]:
        """Every message. A connection that is silent even to a PING raises ``TimeoutError``."""
        now = asyncio.get_running_loop().time
        heard_at, is_probed = now(), False
        while True:
            message = await pubsub.get_message(timeout=self._poll_seconds)
            if message is not None:
                heard_at, is_probed = now(), False
                yield message
            elif now() - heard_at > 2 * self._probe_seconds:
                raise exceptions.TimeoutError("the subscription is silent")
            elif now() - heard_at > self._probe_seconds and not is_probed:
                is_probed = True
                await pubsub.ping()
