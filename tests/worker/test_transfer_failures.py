"""Transfers that end late, early or by a bug, and pairs that do: what is freed, what goes on."""

from collections.abc import Sequence

import torch
from tests.worker.fakes import ToyEngine, ToyPool
from tests.worker.harness import a_client, a_decode, a_sequence, a_worker, eventually
from tests.worker.lone_exchange import Ended, an_exchange, fetch
from tests.worker.loopback import LoopbackHub
from tests.worker.worker_pairs import gated_workers, is_lost, moves_a_block, prefilled, two_workers

from sangam_core.placement import Role
from sangam_core.wire import LossReason, Queued
from sangam_worker.transfer.wire import PairClosed, TransferAccepted, TransferRequest


async def test_an_expired_transfer_loses_the_block_and_a_new_pair_works() -> None:
    # Long enough for the transfer that is to work, on a busy machine too.
    settings = {"transfer_deadline_seconds": 1.0}
    async with gated_workers(**settings) as (sender, transport, receiver, client):
        transport.gate.clear()
        ids = a_sequence()
        first = await prefilled(client, sender, ids)
        second = await client.start(receiver, a_decode(receiver, sender, first.overlay(ids)))
        assert "deadline" in await is_lost(second, "transfer_failed")
        assert await client.is_idle(receiver)
        transport.gate.set()
        await is_lost(first, "transfer_failed")
        assert await client.is_idle(sender)
        await moves_a_block(client, sender, receiver, "next")


async def test_pages_stay_taken_while_a_thread_may_read_them() -> None:
    settings = {"transfer_deadline_seconds": 0.3}
    async with gated_workers(**settings) as (sender, transport, receiver, client):
        transport.gate.clear()
        ids = a_sequence()
        first = await prefilled(client, sender, ids)
        second = await client.start(receiver, a_decode(receiver, sender, first.overlay(ids)))
        await is_lost(second, "transfer_failed")
        first.response.close()
        async with client.http.delete(f"{sender.url}/internal/v1/blocks/r1/0/1") as response:
            assert response.status == 202
        held = await client.held(sender)
        assert [block.num_pages for block in held.blocks] == [4]
        assert held.free_pages == held.total_pages - 4
        transport.gate.set()
        await client.becomes_idle(sender)


async def test_a_cancelled_receiver_is_free_when_the_transfer_has_ended() -> None:
    async with gated_workers() as (sender, transport, receiver, client):
        transport.gate.clear()
        ids = a_sequence()
        first = await prefilled(client, sender, ids)
        second = await client.start(receiver, a_decode(receiver, sender, first.overlay(ids)))
        await eventually(lambda: transport.num_held_up == 1)
        second.response.close()
        held = await client.held(receiver)
        assert [block.stage for block in held.blocks] == ["arriving"]
        transport.gate.set()
        assert (await first.rest())[-1] == "kv_sent"
        await client.becomes_idle(receiver)
        await moves_a_block(client, sender, receiver, "next")


async def test_a_block_whose_turn_has_not_come_can_be_cancelled_at_once() -> None:
    async with gated_workers() as (sender, transport, receiver, client):
        transport.gate.clear()
        ids = a_sequence()
        first = await prefilled(client, sender, ids)
        waiting = await prefilled(client, sender, ids, "waiting")
        moving = await client.start(receiver, a_decode(receiver, sender, first.overlay(ids)))
        await eventually(lambda: transport.num_held_up == 1)
        start = a_decode(receiver, sender, waiting.overlay(ids), "waiting")
        second = await client.start(receiver, start)
        assert isinstance(await second.next(), Queued)
        async with client.http.delete(f"{receiver.url}/internal/v1/blocks/waiting/0/1") as gone:
            assert gone.status == 204
        await is_lost(second, "cancelled")
        transport.gate.set()
        assert (await moving.rest())[-1] == "completed"
        assert (await first.rest())[-1] == "kv_sent"
        waiting.response.close()
        await client.becomes_idle(sender)


async def test_a_channel_that_the_sender_has_lost_is_made_anew() -> None:
    async with two_workers() as (sender, receiver, client):
        await moves_a_block(client, sender, receiver, "one")
        await sender.exchange.close_pairs()
        await moves_a_block(client, sender, receiver, "two")


async def test_a_channel_that_the_receiver_has_lost_is_made_anew() -> None:
    async with two_workers() as (sender, receiver, client):
        await moves_a_block(client, sender, receiver, "one")
        await receiver.exchange.close_pairs()
        await moves_a_block(client, sender, receiver, "two")
        assert sender.exchange.num_pairs == 1


async def test_the_end_of_one_pair_leaves_the_others_working() -> None:
    hub = LoopbackHub()
    async with (
        gated_workers() as (sender, transport, receiver, client),
        a_worker(hub=hub, role=Role.COLOCATED, worker_id="other") as other,
        a_worker(hub=hub, role=Role.DECODE, worker_id="another") as another,
    ):
        transport.gate.clear()
        ids = a_sequence()
        first = await prefilled(client, sender, ids)
        second = await client.start(receiver, a_decode(receiver, sender, first.overlay(ids)))
        await eventually(lambda: transport.num_held_up == 1)
        await moves_a_block(client, other, another, "elsewhere")
        await receiver.exchange.close_pairs()
        await is_lost(second, "transfer_failed")
        await moves_a_block(client, other, another, "elsewhere again")
        transport.gate.set()
        await is_lost(first, "transfer_failed")


async def test_a_worker_that_leaves_closes_its_pairs_at_its_peers_too() -> None:
    hub = LoopbackHub()
    async with a_worker(hub=hub, role=Role.PREFILL) as sender, a_client() as client:
        for life in ("first", "second"):
            async with a_worker(hub=hub, role=Role.DECODE, worker_id="phoenix") as receiver:
                await moves_a_block(client, sender, receiver, life)
                assert sender.exchange.num_pairs == 1
            assert sender.exchange.num_pairs == 0
        sample = 'sangam_worker_transfer_failures_total{direction="sent",reason="failed"}'
        assert await client.metric(sender, sample) == 0


class ForgetfulPool(ToyPool):
    """Fails to take in the first layer that comes."""

    has_failed = False

    def scatter(self, layer: int, pages: Sequence[int], tensor: torch.Tensor) -> None:
        if not self.has_failed:
            self.has_failed = True
            raise ValueError("pages of another shape")
        super().scatter(layer, pages, tensor)


async def test_a_bug_in_a_transfer_costs_the_block_and_not_its_pages() -> None:
    hub, ids = LoopbackHub(), a_sequence()
    engine = ToyEngine(kv_pool=ForgetfulPool())
    async with (
        a_worker(hub=hub, role=Role.PREFILL) as sender,
        a_worker(engine, hub=hub, role=Role.DECODE) as receiver,
        a_client() as client,
    ):
        first = await prefilled(client, sender, ids)
        second = await client.start(receiver, a_decode(receiver, sender, first.overlay(ids)))
        assert "another shape" in await is_lost(second, "transfer_failed")
        await is_lost(first, "transfer_failed")
        assert await client.is_idle(receiver)
        assert await client.is_idle(sender)
        await moves_a_block(client, sender, receiver, "next")


class Nobody:
    """Peers that nobody is to speak to."""

    async def ask(self, url: str, request: TransferRequest, seconds: float) -> TransferAccepted:
        raise AssertionError("nobody was to be asked")

    async def tell(self, url: str, closed: PairClosed) -> None:
        raise AssertionError("no pair was opened")


async def test_a_fetch_that_is_given_up_before_it_could_begin_is_ended_too() -> None:
    ended = Ended()
    exchange = an_exchange(Nobody(), ended, 10.0)
    key = fetch(exchange, "r")
    exchange.give_up(key)
    await eventually(lambda: key in ended.results)
    result = ended.results[key]
    assert isinstance(result, LossReason)
    assert result.code == "cancelled"
    await exchange.close(1.0)
