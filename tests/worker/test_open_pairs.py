"""How many pairs are open, which of them goes for another's sake, and who learns of it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tests.worker.fakes import GatedTransport, ToyPool
from tests.worker.harness import Client, a_client, a_decode, a_sequence, a_worker, eventually
from tests.worker.loopback import LoopbackHub, LoopbackTransport
from tests.worker.worker_pairs import gated_workers, is_lost, moves_a_block, prefilled

from sangam_core.errors import TransferError
from sangam_core.placement import Role
from sangam_worker.process import Worker
from sangam_worker.transfer import exchange, open_pairs
from sangam_worker.transfer.open_pairs import OpenPairs
from sangam_worker.transfer.pairs import Pair, PairKey
from sangam_worker.transfer.pool import KVPool
from sangam_worker.transfer.protocol import KVChannel, Side


class Bounded(LoopbackTransport):
    """Two pairs each way."""

    pairs_each_way = 2


def a_key(peer: str, side: Side = Side.RECEIVER, epoch: str = "e") -> PairKey:
    return PairKey(side, peer, epoch, "own")


class Book:
    """Open pairs of a transport that holds two each way, and what peers were told.

    Attributes:
        told: peer, and whether of a failure. may_answer: cleared, peers keep their ends in use.
    """

    def __init__(self) -> None:
        self.told: list[tuple[str, bool]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.pairs = OpenPairs(Bounded(ToyPool(), LoopbackHub()), self._tell, self._start)

    async def open(self, peer: str, side: Side = Side.RECEIVER, epoch: str = "e") -> Pair:
        key = a_key(peer, side, epoch)
        return await self.pairs.open(key, f"{peer} {epoch}", "", f"http://{peer}")

    def has(self, *peers: str) -> bool:
        found = [peer for peer in "abcd" if self.pairs.get(a_key(peer)) is not None]
        return found == list(peers) and len(self.pairs) == len(peers)

    async def _tell(self, pair: Pair, is_failure: bool) -> None:
        self.told.append((pair.key.peer_id, is_failure))
        await self.may_answer.wait()

    def _start(self, work: Coroutine[None, None, None], name: str) -> object:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        return task


async def test_the_pair_that_was_used_longest_ago_makes_room() -> None:
    book = Book()
    first = await book.open("a")
    await book.open("b")
    with first.used():
        pass
    await book.open("c")
    assert book.has("a", "c")
    assert book.told == [("b", False)]
    await book.pairs.close_all()


async def test_no_pair_is_opened_before_the_one_that_makes_room_is_closed() -> None:
    book = Book()
    going = await book.open("a")
    await book.open("b")
    book.may_answer.clear()
    opening = [asyncio.create_task(book.open(peer)) for peer in ("c", "d")]
    await eventually(lambda: len(book.told) == 1)
    assert book.has("b")
    book.may_answer.set()
    await asyncio.gather(*opening)
    assert book.has("c", "d")
    with pytest.raises(TransferError, match="closed"):
        await going.transfer((0,), 1.0)
    await book.pairs.close_all()


async def test_each_side_has_its_own_pairs() -> None:
    book = Book()
    for peer in ("a", "b"):
        await book.open(peer)
        await book.open(peer, Side.SENDER)
    assert book.told == []
    assert len(book.pairs) == 4
    await book.pairs.close_all()


async def test_a_pair_in_use_is_never_closed_for_another_s_sake() -> None:
    book = Book()
    pair = await book.open("a")
    with pair.used(), (await book.open("b")).used():
        await book.open("c")
        await book.pairs.close(pair)  # taken up since it was found to be idle
        assert book.has("a", "b", "c")
    await book.pairs.close_all()


async def test_a_pair_that_is_waited_for_goes_only_where_all_are_and_the_last_in_turn_first() -> (
    None
):
    book = Book()
    a, _ = await book.open("a"), await book.open("b")
    with a.waited_for():
        c = await book.open("c")
        assert book.has("a", "c")
        with c.waited_for():
            await book.open("d")
        assert book.has("a", "d")
    await book.pairs.close_all()


async def test_a_receiver_that_asks_for_a_sender_s_pair_is_not_asked_whether_it_may_go() -> None:
    """It would answer once its block has come, which waits for the place of whoever asks."""
    book = Book()
    pairs = [await book.open(peer, Side.SENDER) for peer in ("a", "b")]
    with pairs[0].waited_for(), pairs[1].waited_for():
        await book.open("c", Side.SENDER)
    assert book.told == []
    assert len(book.pairs) == 2
    await book.pairs.close_all()


async def test_a_peer_s_former_life_is_dropped_when_it_is_met_again() -> None:
    book = Book()
    await book.open("a", epoch="e1")
    await book.open("a", epoch="e2")
    assert len(book.pairs) == 1
    assert book.pairs.get(a_key("a", epoch="e1")) is None
    await book.pairs.close_all()


async def test_a_pair_that_the_peer_closes_goes_when_it_is_not_used_any_more() -> None:
    book = Book()
    pair = await book.open("a")
    await book.pairs.closed_by_peer("unknown", is_failure=True)
    assert book.has("a")
    with pair.used():
        closing = asyncio.create_task(book.pairs.closed_by_peer("a e", is_failure=False))
        await asyncio.sleep(0)
        assert not closing.done()
        assert book.has("a")
    await closing
    assert book.has()
    assert book.told == []


async def test_a_pair_that_failed_at_the_peer_goes_at_once() -> None:
    book = Book()
    with (await book.open("a")).used():
        await book.pairs.closed_by_peer("a e", is_failure=True)
        assert book.has()
    assert book.told == []


async def test_a_pair_that_failed_here_is_told_as_such() -> None:
    book = Book()
    pair = await book.open("a")
    book.pairs.fail(pair)
    book.pairs.fail(pair)
    await eventually(lambda: book.told == [("a", True)])
    assert book.has()
    await book.pairs.close_all()


async def test_pairs_that_move_nothing_are_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_pairs, "_IDLE_SECONDS", 0.05)
    book = Book()
    used, _ = await book.open("a"), await book.open("b")
    waited_for = await book.open("c", Side.SENDER)
    with used.used(), waited_for.waited_for():
        await eventually(lambda: book.told == [("b", False)])
        assert len(book.pairs) == 2
    await eventually(lambda: sorted(book.told) == [(peer, False) for peer in "abc"])


# -- between workers --------------------------------------------------------------------------


@asynccontextmanager
async def workers(num_senders: int, num_receivers: int) -> AsyncIterator[tuple[Any, ...]]:
    """Senders, receivers and a client; each worker has room for two pairs each way."""
    hub = LoopbackHub()

    def make_transport(pool: KVPool) -> LoopbackTransport:
        return Bounded(pool, hub)

    async with AsyncExitStack() as running:

        async def started(role: Role, name: str) -> Worker:
            worker = a_worker(role=role, worker_id=name, make_transport=make_transport)
            return await running.enter_async_context(worker)

        senders = [await started(Role.PREFILL, f"s{n}") for n in range(num_senders)]
        receivers = [await started(Role.DECODE, f"r{n}") for n in range(num_receivers)]
        yield senders, receivers, await running.enter_async_context(a_client())


async def num_failures(client: Client, worker: Worker) -> float:
    _, text = await client.get(worker, "/metrics")
    name = "sangam_worker_transfer_failures_total"
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


async def test_a_receiver_with_more_peers_than_pairs_closes_idle_ones_on_both_sides() -> None:
    async with workers(3, 1) as (senders, (receiver,), client):
        for turn in range(2):
            for number, sender in enumerate(senders):
                await moves_a_block(client, sender, receiver, f"{turn}-{number}")
                assert receiver.exchange.num_pairs <= 2
        await eventually(lambda: [s.exchange.num_pairs for s in senders] == [0, 1, 1])
        assert await client.metric(receiver, "sangam_worker_kv_pairs") == 2
        for worker in (receiver, *senders):
            assert await num_failures(client, worker) == 0


async def test_a_sender_with_more_peers_than_pairs_closes_idle_ones_on_both_sides() -> None:
    async with workers(1, 3) as ((sender,), receivers, client):
        for turn in range(2):
            for number, receiver in enumerate(receivers):
                await moves_a_block(client, sender, receiver, f"{turn}-{number}")
                assert sender.exchange.num_pairs <= 2
        await eventually(lambda: [r.exchange.num_pairs for r in receivers] == [0, 1, 1])
        for worker in (sender, *receivers):
            assert await num_failures(client, worker) == 0


async def test_blocks_of_more_peers_than_pairs_all_arrive_when_they_come_at_once() -> None:
    async with workers(4, 2) as (senders, receivers, client):
        await asyncio.gather(
            *(
                moves_a_block(client, sender, receiver, f"{turn}-{s}-{r}")
                for turn in range(3)
                for s, sender in enumerate(senders)
                for r, receiver in enumerate(receivers)
            )
        )
        for worker in (*senders, *receivers):
            assert await num_failures(client, worker) == 0


# -- the end of a transfer that nobody wants any more -----------------------------------------


class Nowhere(LoopbackTransport):
    """The other end never comes."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool, LoopbackHub())
        self.is_connecting = threading.Event()

    def connect(
        self,
        side: Side,
        communicator: str,
        offer: str,
        timeout_seconds: float,
        given_up: threading.Event,
    ) -> KVChannel:
        self.is_connecting.set()
        return super().connect(side, communicator, offer, timeout_seconds, given_up)


@asynccontextmanager
async def a_lonely_receiver() -> AsyncIterator[tuple[Worker, Worker, Nowhere, Client]]:
    made: list[Nowhere] = []

    def make_transport(pool: KVPool) -> Nowhere:
        made.append(Nowhere(pool))
        return made[-1]

    slow = {"transfer_deadline_seconds": 60.0, "make_transport": make_transport}
    async with (
        a_worker(role=Role.PREFILL, worker_id="sender", **slow) as sender,
        a_worker(role=Role.DECODE, worker_id="receiver", **slow) as receiver,
        a_client() as client,
    ):
        yield sender, receiver, made[-1], client


async def test_connecting_ends_at_once_on_both_sides_when_nobody_wants_the_block() -> None:
    async with a_lonely_receiver() as (sender, receiver, transport, client):
        ids = a_sequence()
        first = await prefilled(client, sender, ids)
        second = await client.start(receiver, a_decode(receiver, sender, first.overlay(ids)))
        await eventually(transport.is_connecting.is_set)
        second.response.close()
        await client.becomes_idle(receiver)
        await is_lost(first, "transfer_failed")
        await client.becomes_idle(sender)


async def test_a_worker_that_stops_does_not_wait_for_a_peer_that_does_not_come() -> None:
    async with a_lonely_receiver() as (sender, receiver, transport, client):
        ids = a_sequence()
        first = await prefilled(client, sender, ids)
        second = await client.start(receiver, a_decode(receiver, sender, first.overlay(ids)))
        await eventually(transport.is_connecting.is_set)
        began = time.monotonic()
        await receiver.exchange.close(30.0)
        assert time.monotonic() - began < 5
        await is_lost(second, "transfer_failed")
        first.response.close()


async def test_a_transfer_whose_peer_does_nothing_ends_soon_after_its_block_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "_GRACE_SECONDS", 0.2)
    gated = gated_workers(transfer_deadline_seconds=60.0)
    async with gated as (sender, transport, receiver, client):
        transport.gate.clear()
        ids = a_sequence()
        first = await prefilled(client, sender, ids)
        second = await client.start(receiver, a_decode(receiver, sender, first.overlay(ids)))
        await eventually(lambda: transport.num_held_up == 1)
        second.response.close()
        await client.becomes_idle(receiver)
        transport.gate.set()
        await is_lost(first, "transfer_failed")


async def test_the_drain_s_deadline_ends_transfers_too() -> None:
    async with gated_workers(transfer_deadline_seconds=60.0, drain_deadline_seconds=0.2) as (
        sender,
        transport,
        receiver,
        client,
    ):
        transport.gate.clear()
        ids = a_sequence()
        first = await prefilled(client, sender, ids)
        second = await client.start(receiver, a_decode(receiver, sender, first.overlay(ids)))
        await eventually(lambda: transport.num_held_up == 1)
        began = time.monotonic()
        await receiver.control.leave()
        assert time.monotonic() - began < 4
        await is_lost(second, "draining")
        transport.gate.set()
        await is_lost(first, "transfer_failed")


class OneAtATime(GatedTransport):
    """A single transfer each way."""

    @property
    def transfers_each_way(self) -> int:
        return 1


async def test_a_sender_without_a_place_keeps_the_receiver_waiting_until_it_has_one() -> None:
    hub, made = LoopbackHub(), []

    def make_transport(pool: KVPool) -> OneAtATime:
        made.append(OneAtATime(LoopbackTransport(pool, hub)))
        return made[-1]

    ids = a_sequence()
    async with (
        a_worker(role=Role.PREFILL, make_transport=make_transport) as sender,
        a_worker(role=Role.DECODE, hub=hub) as one,
        a_worker(role=Role.DECODE, hub=hub) as other,
        a_client() as client,
    ):
        (transport,) = made
        transport.gate.clear()
        firsts = [await prefilled(client, sender, ids, name) for name in ("1", "2")]
        start = a_decode(one, sender, firsts[0].overlay(ids), "1")
        seconds = [await client.start(one, start)]
        await eventually(lambda: transport.num_held_up == 1)
        start = a_decode(other, sender, firsts[1].overlay(ids), "2")
        seconds.append(await client.start(other, start))
        await eventually(lambda: other.exchange.num_pairs == 1)
        assert sender.exchange.num_pairs == 1
        transport.gate.set()
        for run in seconds:
            assert (await run.rest())[-1] == "completed"
        for run in firsts:
            assert (await run.rest())[-1] == "kv_sent"
