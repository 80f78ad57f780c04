"""Every wait of a transfer ends: at the deadline of the side that waits, or with its pair."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
from tests.worker.fakes import GatedTransport, ToyPool
from tests.worker.harness import a_client, a_decode, a_sequence, a_start, a_worker, eventually
from tests.worker.lone_exchange import Ended, an_exchange, fetch
from tests.worker.loopback import LoopbackHub, LoopbackTransport
from tests.worker.test_open_pairs import Book
from tests.worker.worker_pairs import is_lost, prefilled

from sangam_core.errors import TransferError
from sangam_core.placement import Role
from sangam_core.wire import LossReason
from sangam_worker.transfer import open_pairs
from sangam_worker.transfer.pairs import Pair, PairKey
from sangam_worker.transfer.pool import KVGeometry, KVPool
from sangam_worker.transfer.protocol import KVChannel, Side
from sangam_worker.transfer.wire import PairClosed, TransferAccepted, TransferRequest


async def test_a_sender_s_own_deadline_holds_however_long_the_receiver_would_wait() -> None:
    sends = {"role": Role.PREFILL, "transfer_deadline_seconds": 0.2}
    async with a_worker(**sends) as sender, a_client() as client, asyncio.timeout(20):
        first = await prefilled(client, sender, a_sequence())
        request = TransferRequest(
            key=a_start(sender).key,
            sender_epoch=sender.standing.epoch,
            receiver_id="never connects",
            receiver_epoch="e",
            model="small",
            kv=KVGeometry.of(ToyPool()),
            transport="loopback",
            num_pages=4,
            communicator="c",
            offer="",
            timeout_seconds=600.0,
        )
        body = request.model_dump_json()
        async with await client.post(sender, "/internal/v1/transfers", body) as response:
            assert response.status == 200
        assert "deadline" in await is_lost(first, "transfer_failed")
        await client.becomes_idle(sender)


async def test_a_block_behind_a_transfer_that_does_not_end_fails_at_its_own_deadline() -> None:
    hub, gated = LoopbackHub(), []

    def make_transport(pool: KVPool) -> GatedTransport:
        gated.append(GatedTransport(LoopbackTransport(pool, hub)))
        return gated[0]

    short = {"role": Role.DECODE, "transfer_deadline_seconds": 0.3}
    async with (
        a_worker(hub=hub, role=Role.PREFILL) as sender,
        a_worker(make_transport=make_transport, **short) as receiver,
        a_client() as client,
        asyncio.timeout(20),
    ):
        gated[0].gate.clear()
        ids = a_sequence()
        firsts = [await prefilled(client, sender, ids, name) for name in ("moves", "waits")]
        moving = await client.start(
            receiver, a_decode(receiver, sender, firsts[0].overlay(ids), "moves")
        )
        await eventually(lambda: gated[0].num_held_up == 1)
        waiting = await client.start(
            receiver, a_decode(receiver, sender, firsts[1].overlay(ids), "waits")
        )
        message = await is_lost(waiting, "transfer_failed")
        assert "its turn did not come before the deadline" in message
        gated[0].gate.set()
        await moving.rest()
        for run in firsts:
            run.response.close()
        await client.becomes_idle(receiver)
        await client.becomes_idle(sender)


class AnotherLife:
    """A sender that has another epoch by now."""

    async def ask(self, url: str, request: TransferRequest, seconds: float) -> TransferAccepted:
        return TransferAccepted(sender_id="s", sender_epoch="another")

    async def tell(self, url: str, closed: PairClosed) -> None: ...


async def test_a_sender_that_answers_with_another_epoch_is_not_received_from() -> None:
    ended = Ended()
    exchange = an_exchange(AnotherLife(), ended, 60.0)
    key = fetch(exchange, "r", "s")
    await eventually(lambda: key in ended.results)
    result = ended.results[key]
    assert isinstance(result, LossReason)
    assert "another epoch" in result.message
    assert exchange.num_pairs == 0
    await exchange.close(1.0)


async def test_a_pair_that_a_transfer_waits_for_is_not_swept_as_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_pairs, "_IDLE_SECONDS", 0.05)
    book = Book()
    wanted, _ = await book.open("a"), await book.open("b")
    with wanted.waited_for():
        await eventually(lambda: book.told == [("b", False)])
        assert book.has("a")
    await eventually(lambda: book.told == [("b", False), ("a", False)])


# -- one pair -------------------------------------------------------------------------------------


class Channel:
    """Moves nothing until it is aborted."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_aborted = threading.Event()

    def send(self, pages: Sequence[int], timeout_seconds: float) -> int:
        return self.receive(pages, timeout_seconds)

    def receive(self, pages: Sequence[int], timeout_seconds: float) -> int:
        self.num_calls += 1
        self.is_aborted.wait(timeout_seconds)
        raise TransferError("the channel was aborted")

    def abort(self) -> None:
        self.is_aborted.set()


class Connects(LoopbackTransport):
    """Connects when it may, whether or not anybody still wants it, as a library in C would."""

    def __init__(self) -> None:
        super().__init__(ToyPool(), LoopbackHub())
        self.channel = Channel()
        self.is_connecting, self.may_connect = threading.Event(), threading.Event()

    def connect(
        self,
        side: Side,
        communicator: str,
        offer: str,
        timeout_seconds: float,
        given_up: threading.Event,
    ) -> KVChannel:
        self.is_connecting.set()
        assert self.may_connect.wait(30), "a test forgot it"
        return self.channel


def a_pair(transport: Connects) -> Pair:
    return Pair(PairKey(Side.RECEIVER, "s", "e", "own"), transport, "c", "", "")


async def test_a_pair_that_is_closed_while_it_connects_aborts_the_channel_it_gets() -> None:
    transport = Connects()
    pair = a_pair(transport)
    moving = asyncio.create_task(pair.transfer((1,), 60.0))
    await eventually(transport.is_connecting.is_set)
    pair.abort()
    transport.may_connect.set()
    with pytest.raises(TransferError):
        await asyncio.wait_for(moving, 5)
    assert transport.channel.is_aborted.is_set()


async def test_nothing_is_moved_when_connecting_took_all_the_time() -> None:
    transport = Connects()
    transport.may_connect.set()
    pair = a_pair(transport)
    with pytest.raises(TransferError, match="deadline has passed"):
        await pair.transfer((1,), 0.0)
    assert transport.channel.num_calls == 0
    pair.abort()
