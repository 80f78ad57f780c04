"""Listens on the wake channel and signals the waiters that should look again.

One subscription a router, however many wait. Messages: ``head`` names the routers of the heads
of the two lines (``lua/common.lua``); anything else (a worker came, went or drains) concerns
everyone. A subscription that breaks is made again; whatever was missed is made up for by looking
once after every (re)subscription, and by the slow poll.
"""

import asyncio
import contextlib

from redis import exceptions
from redis.asyncio.client import PubSub

from sangam_router.ledger.lines import WaitingLines
from sangam_router.ledger.records import UNIT_SEPARATOR, Line
from sangam_router.ledger.scripts import Client

_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 5.0


class Wakeups:
    """The wake channel of one namespace, for one router.

    Args:
        poll_seconds: how often the oldest waiters look without having been called.
    """

    def __init__(
        self,
        redis: Client,
        channel: str,
        lines: WaitingLines,
        *,
        owner: str,
        poll_seconds: float,
    ) -> None:
        self._redis = redis
        self._channel = channel
        self._lines = lines
        self._owner = owner
        self._poll_seconds = poll_seconds

    async def run(self) -> None:
        """Listen and poll until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll(), name="ledger poll")
            group.create_task(self._listen(), name="ledger wake-ups")

    def heard(self, message: str) -> None:
        """Signal whom a message concerns."""
        kind, *heads = message.split(UNIT_SEPARATOR)
        if kind != "head" or len(heads) != len(Line):
            self._signal_all()
            return
        for line, owner in zip(Line, heads, strict=True):
            if owner == self._owner:
                self._lines.rooms[line].signal_oldest()

    def _signal_all(self) -> None:
        for room in self._lines.rooms.values():
            room.signal_oldest()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            self._signal_all()

    async def _listen(self) -> None:
        backoff_seconds = _FIRST_BACKOFF_SECONDS
        while True:
            pubsub: PubSub = self._redis.pubsub()
            try:
                await pubsub.subscribe(self._channel)
                self._signal_all()
                backoff_seconds = _FIRST_BACKOFF_SECONDS
                await self._follow(pubsub)
            except (exceptions.RedisError, OSError):
                await asyncio.sleep(backoff_seconds)
                backoff_seconds = min(2 * backoff_seconds, _LONGEST_BACKOFF_SECONDS)
            finally:
                with contextlib.suppress(exceptions.RedisError, OSError):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _follow(self, pubsub: PubSub) -> None:
        while True:
            message = await pubsub.get_message(
                ignore_subscribe_messages=True, timeout=self._poll_seconds
            )
            if message is not None:
                self.heard(message["data"])
