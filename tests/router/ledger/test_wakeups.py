"""The subscription behind the wake-ups: it notices a silent server, and is made again."""

import asyncio
import signal
from os import kill

import pytest

from sangam_router.ledger import Line
from sangam_router.ledger.connect import connect
from sangam_router.ledger.waiting import WaitingRoom
from sangam_router.ledger.wakeups import Calls, Wakeups
from sangam_router.local.redis_server import running_redis

pytestmark = pytest.mark.integration


class News:
    """Counts news, and waits for more of it."""

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def come(self) -> None:
        self.count += 1
        self._event.set()

    async def more(self) -> None:
        async with asyncio.timeout(20.0):
            await self._event.wait()
        self._event.clear()


@pytest.mark.parametrize("is_cluster", [False, True], ids=["single", "cluster"])
async def test_a_subscription_is_kept_while_the_server_lives_and_remade_when_not(
    is_cluster: bool,
) -> None:
    with running_redis(is_cluster_node=is_cluster) as server:
        redis = connect(server.url, cluster=is_cluster, timeout_seconds=0.5)
        news = News()
        calls = Calls("me", {line: WaitingRoom() for line in Line}, news.come)
        wakeups = Wakeups(redis, "channel", calls, poll_seconds=0.05, probe_seconds=0.7)
        listening = asyncio.create_task(wakeups.run())
        await news.more()

        # Silent for several probes: the server's answers keep the subscription.
        await asyncio.sleep(2.2)
        assert news.count == 1
        await redis.publish("channel", "w1")
        await news.more()

        # Standing still: given up, and made again once it goes on.
        kill(server.pid, signal.SIGSTOP)
        await asyncio.sleep(2.2)
        kill(server.pid, signal.SIGCONT)
        await news.more()

        server.kill()
        await asyncio.sleep(0.5)
        server.start()
        await news.more()
        await redis.publish("channel", "w1")
        await news.more()
        listening.cancel()
        await asyncio.wait([listening])
        await redis.aclose()
