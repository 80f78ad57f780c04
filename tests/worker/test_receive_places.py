"""How many blocks a worker receives at once: the places, and the exchange that keeps to them."""

import asyncio
import threading
from contextlib import AsyncExitStack, suppress

import pytest
from tests.worker.fakes import NEVER, ToyPool
from tests.worker.harness import eventually
from tests.worker.lone_exchange import Ended, Peers, an_exchange, fetch
from tests.worker.loopback import LoopbackHub, LoopbackTransport

from sangam_core.errors import TransferError
from sangam_core.wire import LossReason
from sangam_worker.tracking import Moved
from sangam_worker.transfer.exchange import KVExchange
from sangam_worker.transfer.places import TransferPlaces
from sangam_worker.transfer.protocol import Side
from sangam_worker.transfer.refusals import refused
from sangam_worker.transfer.wire import PairClosed, TransferAccepted, TransferRequest


async def taken(
    places: TransferPlaces, held: AsyncExitStack, is_connected: bool, seconds: float = 0.02
) -> None:
    await held.enter_async_context(places.taken(is_connected=is_connected, timeout_seconds=seconds))


async def test_there_are_as_many_places_as_the_transport_can_receive_at_once() -> None:
    places = TransferPlaces(3, "received")
    async with AsyncExitStack() as held:
        for _ in range(3):
            await taken(places, held, is_connected=True)
        with pytest.raises(TransferError, match="at most 3 at once"):
            await taken(places, held, is_connected=True)
    async with AsyncExitStack() as held:
        for _ in range(3):
            await taken(places, held, is_connected=True)


async def test_peers_that_cannot_be_reached_leave_half_of_the_places_to_others() -> None:
    places = TransferPlaces(4, "received")
    async with AsyncExitStack() as held:
        for _ in range(2):
            await taken(places, held, is_connected=False)
        with pytest.raises(TransferError):
            await taken(places, held, is_connected=False)
        for _ in range(2):
            await taken(places, held, is_connected=True)
    async with AsyncExitStack() as held:
        for _ in range(2):
            await taken(places, held, is_connected=False)


async def test_a_single_place_is_for_new_peers_too() -> None:
    async with AsyncExitStack() as held:
        await taken(TransferPlaces(1, "received"), held, is_connected=False)


async def test_who_gives_up_waiting_takes_no_place() -> None:
    places = TransferPlaces(1, "received")
    async with AsyncExitStack() as held, AsyncExitStack() as never:
        await taken(places, held, is_connected=False)
        waiting = asyncio.create_task(taken(places, never, is_connected=False, seconds=30.0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with AsyncExitStack() as held:
        await taken(places, held, is_connected=False)


class FewReceives(LoopbackTransport):
    """One block at a time."""

    transfers_each_way = 1


class SilentSenders:
    """Senders that do not answer until they are told to refuse."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.told: list[str] = []
        self.refuses = asyncio.Event()

    async def ask(self, url: str, request: TransferRequest, seconds: float) -> TransferAccepted:
        self.asked.append(request.key.request_id)
        async with asyncio.timeout(30):
            await self.refuses.wait()
        raise TransferError("no")

    async def tell(self, url: str, closed: PairClosed) -> None:
        self.told.append(url)


class SlowSender(SilentSenders):
    """Begins to send when it is told to refuse."""

    async def ask(self, url: str, request: TransferRequest, seconds: float) -> TransferAccepted:
        with suppress(TransferError):
            await super().ask(url, request, seconds)
        return TransferAccepted(sender_id="a", sender_epoch="e")


class ForgetfulSender(SilentSenders):
    """Sends its first block; then it loses the channel, and says so when it is let."""

    def __init__(self, hub: LoopbackHub) -> None:
        super().__init__()
        self.may_say_so = asyncio.Event()
        self._transport = LoopbackTransport(ToyPool(), hub)

    async def ask(self, url: str, request: TransferRequest, seconds: float) -> TransferAccepted:
        if request.key.request_id == "first":
            threading.Thread(target=self._send, args=(request.communicator,)).start()
            return TransferAccepted(sender_id="a", sender_epoch="e")
        if request.key.request_id == "second":
            await asyncio.wait_for(self.may_say_so.wait(), 30)
            raise refused("stale_channel", "it is not connected here")
        return await super().ask(url, request, seconds)

    def _send(self, communicator: str) -> None:
        channel = self._transport.connect(Side.SENDER, communicator, "", 10.0, NEVER)
        channel.send((1, 2), 10.0)


def one_at_a_time(
    senders: Peers, ended: Ended, seconds: float, hub: LoopbackHub | None = None
) -> KVExchange:
    """An exchange over a transport that receives one block at a time."""
    transport = FewReceives(ToyPool(), hub or LoopbackHub())
    return an_exchange(senders, ended, seconds, transport)


async def test_no_sender_is_asked_before_there_is_a_place_to_receive_in() -> None:
    senders, ended = SilentSenders(), Ended()
    exchange = one_at_a_time(senders, ended, 30.0)
    fetch(exchange, "a")
    await eventually(lambda: senders.asked == ["a"])
    b, c = fetch(exchange, "b"), fetch(exchange, "c")
    exchange.give_up(b)
    await eventually(lambda: b in ended.results)
    assert senders.asked == ["a"]
    senders.refuses.set()
    await eventually(lambda: c in ended.results)
    assert senders.asked == ["a", "c"]
    await exchange.close(1.0)


async def test_a_block_that_waits_again_as_its_channel_was_lost_can_be_given_up() -> None:
    hub, ended = LoopbackHub(), Ended()
    senders = ForgetfulSender(hub)
    exchange = one_at_a_time(senders, ended, 30.0, hub)
    first = fetch(exchange, "first", "a")
    await eventually(lambda: first in ended.results)
    assert isinstance(ended.results[first], Moved)
    second = fetch(exchange, "second", "a")
    await asyncio.sleep(0)
    fetch(exchange, "other")
    await asyncio.sleep(0)
    senders.may_say_so.set()
    await eventually(lambda: senders.asked == ["other"])
    exchange.give_up(second)
    await eventually(lambda: second in ended.results)
    result = ended.results[second]
    assert isinstance(result, LossReason)
    assert result.code == "cancelled"
    senders.refuses.set()
    await exchange.close(1.0)


async def test_a_sender_that_begins_when_nobody_wants_the_block_any_more_is_told_once_more() -> (
    None
):
    senders, ended = SlowSender(), Ended()
    exchange = one_at_a_time(senders, ended, 30.0)
    key = fetch(exchange, "a")
    await eventually(lambda: senders.asked == ["a"])
    exchange.give_up(key)
    await eventually(lambda: senders.told == ["http://a"])
    senders.refuses.set()
    await eventually(lambda: key in ended.results)
    assert senders.told == ["http://a", "http://a"]
    await exchange.close(1.0)


async def test_a_block_for_which_no_place_comes_free_fails_at_its_deadline_and_opens_no_pair() -> (
    None
):
    senders, ended = SilentSenders(), Ended()
    exchange = one_at_a_time(senders, ended, 0.3)
    fetch(exchange, "a")
    await eventually(lambda: senders.asked == ["a"])
    b = fetch(exchange, "b")
    await eventually(lambda: b in ended.results)
    result = ended.results[b]
    assert isinstance(result, LossReason)
    assert "at most 1 at once" in result.message
    assert senders.asked == ["a"]
    assert exchange.num_pairs == 1
    senders.refuses.set()
    await exchange.close(1.0)


async def test_a_block_whose_deadline_has_passed_asks_no_sender() -> None:
    senders, ended = SilentSenders(), Ended()
    exchange = one_at_a_time(senders, ended, 0.0)
    key = fetch(exchange, "a")
    await eventually(lambda: key in ended.results)
    result = ended.results[key]
    assert isinstance(result, LossReason)
    assert result.message == "the deadline passed before its sender was asked"
    assert senders.asked == []
    await exchange.close(1.0)


async def test_a_pair_whose_sender_failed_is_closed_and_its_sender_told() -> None:
    senders, ended = SilentSenders(), Ended()
    exchange = one_at_a_time(senders, ended, 30.0)
    key = fetch(exchange, "a")
    senders.refuses.set()
    await eventually(lambda: key in ended.results)
    assert exchange.num_pairs == 0
    await eventually(lambda: senders.told == ["http://a"])
    await exchange.close(1.0)
