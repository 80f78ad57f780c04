"""KV on its way between two workers: the exchange and the internal API, over the loopback."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from tests.worker.fakes import GatedTransport, ToyEngine, ToyPool, toy_answer
from tests.worker.harness import (
    BlockRun,
    Client,
    a_client,
    a_decode,
    a_sequence,
    a_start,
    a_worker,
    eventually,
)

from sangam_core.decoding import Resume
from sangam_core.errors import TransferError
from sangam_core.placement import Role
from sangam_core.wire import BlockKey, KVArrived, KVSource, LossReason, Lost, PassRan, Queued
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.process import Worker
from sangam_worker.standing import Standing
from sangam_worker.tracking import Moved
from sangam_worker.transfer.exchange import KVExchange
from sangam_worker.transfer.loopback import LoopbackHub, LoopbackTransport
from sangam_worker.transfer.pool import KVGeometry, KVPool
from sangam_worker.transfer.protocol import KVChannel, Side
from sangam_worker.transfer.wire import TransferAccepted, TransferRequest

BLOCK_0 = range(20, 36)


@asynccontextmanager
async def two_workers(
    hub: LoopbackHub | None = None, **settings: Any
) -> AsyncIterator[tuple[Worker, Worker, Client]]:
    """A prefill worker and a decode worker."""
    shared = hub or LoopbackHub()
    async with (
        a_worker(hub=shared, role=Role.PREFILL, worker_id="sender", **settings) as sender,
        a_worker(hub=shared, role=Role.DECODE, worker_id="receiver", **settings) as receiver,
        a_client() as client,
    ):
        yield sender, receiver, client


async def prefilled(
    client: Client, sender: Worker, ids: Sequence[int], request_id: str = "r1"
) -> BlockRun:
    """A block that waits at the sender."""
    run = await client.start(sender, a_start(sender, request_id, ids=ids, hands_over=True))
    await run.until(PassRan)
    return run


async def is_lost(run: BlockRun, code: str) -> str:
    """Read to the end, which must be a loss; its message."""
    assert (await run.rest())[-1] == "lost"
    lost = run.events[-1]
    assert isinstance(lost, Lost)
    assert lost.reason.code == code
    return lost.reason.message


async def test_a_block_is_prefilled_on_one_worker_and_decoded_on_another() -> None:
    async with two_workers() as (sender, receiver, client):
        ids = a_sequence()
        first = await prefilled(client, sender, ids)
        second = await client.start(receiver, a_decode(receiver, sender, first.overlay(ids)))
        assert await second.rest() == ["queued", "kv_arrived", "pass", "completed"]
        assert await first.rest() == ["queued", "prefilled", "pass", "kv_sent"]
        assert first.tokens() + second.tokens() == toy_answer(ids, BLOCK_0)
        arrived = second.events[1]
        assert isinstance(arrived, KVArrived)
        page_bytes = 2 * 16 * 1 * 2 * 4
        assert arrived.num_bytes == 2 * 4 * page_bytes
        assert await client.is_idle(sender)
        assert await client.is_idle(receiver)
        for worker, direction in ((sender, "sent"), (receiver, "received")):
            sample = f'sangam_worker_transfer_bytes_total{{direction="{direction}"}}'
            assert await client.metric(worker, sample) == arrived.num_bytes


async def test_blocks_of_one_pair_take_turns_and_all_arrive() -> None:
    async with two_workers() as (sender, receiver, client):
        sequences = [[10 + n, *a_sequence()[1:]] for n in range(6)]
        firsts = [await prefilled(client, sender, ids, f"r{n}") for n, ids in enumerate(sequences)]
        seconds = [
            await client.start(receiver, a_decode(receiver, sender, first.overlay(ids), f"r{n}"))
            for n, (first, ids) in enumerate(zip(firsts, sequences, strict=True))
        ]
        await asyncio.gather(*(run.rest() for run in (*firsts, *seconds)))
        for first, second, ids in zip(firsts, seconds, sequences, strict=True):
            assert first.tokens() + second.tokens() == toy_answer(ids, BLOCK_0)
        assert (sender.exchange.num_pairs, receiver.exchange.num_pairs) == (1, 1)
        assert await client.metric(sender, "sangam_worker_kv_pairs") == 1
        assert await client.is_idle(sender)
        assert await client.is_idle(receiver)


async def test_a_block_that_pass_0_completes_is_not_handed_over() -> None:
    engine = ToyEngine(commits_per_pass=16)
    async with a_worker(engine, role=Role.PREFILL) as sender, a_client() as client:
        run = await client.start(sender, a_start(sender, hands_over=True))
        assert await run.rest() == ["queued", "prefilled", "pass", "completed"]
        assert await client.is_idle(sender)


async def test_a_restarted_block_is_handed_over_after_a_prefill_that_commits_nothing() -> None:
    async with two_workers() as (sender, receiver, client):
        ids, whole = a_sequence(), toy_answer(a_sequence(), BLOCK_0)
        first = await prefilled(client, sender, ids)
        resume = Resume(step=1, initial_masks=16, commits=tuple(first.commits), carry=8.0)
        start = a_start(sender, "again", ids=ids, hands_over=True, resume=resume)
        again = await client.start(sender, start)
        await eventually(lambda: again_is_held(client, sender))
        second = await client.start(
            receiver,
            a_decode(receiver, sender, first.overlay(ids), "again", resume=resume),
        )
        await second.rest()
        assert await again.rest() == ["queued", "prefilled", "kv_sent"]
        assert second.tokens() == whole[8:]
        first.response.close()


async def again_is_held(client: Client, sender: Worker) -> bool:
    blocks = (await client.held(sender)).blocks
    return any(b.key.request_id == "again" and b.stage == "holding" for b in blocks)


# -- refusals ---------------------------------------------------------------------------------


async def test_a_block_that_is_not_held_there_is_lost_at_once() -> None:
    async with two_workers() as (sender, receiver, client):
        run = await client.start(receiver, a_decode(receiver, sender, a_sequence()))
        assert "does not wait here" in await is_lost(run, "transfer_failed")
        assert await client.is_idle(receiver)
        sample = 'sangam_worker_transfer_failures_total{direction="received",reason="not_held"}'
        assert await client.metric(receiver, sample) == 1


async def test_a_sender_of_another_epoch_refuses() -> None:
    async with two_workers() as (sender, receiver, client):
        first = await prefilled(client, sender, a_sequence())
        start = a_decode(receiver, sender, a_sequence())
        assert start.source is not None
        former = start.source.model_copy(update={"epoch": "former"})
        run = await client.start(receiver, start.model_copy(update={"source": former}))
        assert "epoch" in await is_lost(run, "transfer_failed")
        first.response.close()


async def test_workers_with_other_kv_or_another_model_do_not_exchange_it() -> None:
    async with two_workers() as (sender, _, client):
        first = await prefilled(client, sender, a_sequence())
        geometry = KVGeometry.of(ToyPool())
        good = TransferRequest(
            key=a_start(sender).key,
            sender_epoch=sender.standing.epoch,
            receiver_id="x",
            receiver_epoch="y",
            model="small",
            kv=geometry,
            transport="loopback",
            num_pages=4,
            communicator="c",
            offer="",
            timeout_seconds=1.0,
        )
        for changes, word in (
            ({"model": "other"}, "model"),
            ({"kv": geometry.model_copy(update={"num_layers": 3})}, "KV geometry"),
            ({"kv": geometry.model_copy(update={"dtype": "bfloat16"})}, "KV geometry"),
            ({"transport": "nccl"}, "SANGAM_KV_TRANSPORT"),
            ({"num_pages": 5}, "pages"),
        ):
            body = good.model_copy(update=changes).model_dump_json()
            async with await client.post(sender, "/internal/v1/transfers", body) as response:
                assert response.status == 409
                answer = await response.json()
            assert answer["code"] == "mismatch"
            assert word in answer["message"]
        assert (await client.held(sender)).blocks[0].stage == "holding"
        first.response.close()
        await client.becomes_idle(sender)


async def test_a_sender_that_cannot_be_reached_loses_the_block() -> None:
    async with a_worker(role=Role.DECODE) as receiver, a_client() as client:
        start = a_decode(receiver, receiver, a_sequence())
        assert start.source is not None
        gone = start.source.model_copy(update={"url": "http://127.0.0.1:1"})
        run = await client.start(receiver, start.model_copy(update={"source": gone}))
        assert "asking http://127.0.0.1:1" in await is_lost(run, "transfer_failed")
        assert await client.is_idle(receiver)


# -- failures under way -------------------------------------------------------------------------


@asynccontextmanager
async def gated_workers(
    **settings: Any,
) -> AsyncIterator[tuple[Worker, GatedTransport, Worker, Client]]:
    """Two workers; the sender's transfers pass a gate."""
    hub, gated = LoopbackHub(), []

    def make_transport(pool: KVPool) -> GatedTransport:
        gated.append(GatedTransport(LoopbackTransport(pool, hub)))
        return gated[0]

    sends = {"role": Role.PREFILL, "worker_id": "sender", "make_transport": make_transport}
    receives = {"role": Role.DECODE, "worker_id": "receiver", "hub": hub}
    async with (
        a_worker(**sends, **settings) as sender,
        a_worker(**receives, **settings) as receiver,
        a_client() as client,
    ):
        yield sender, gated[0], receiver, client


async def moves_a_block(client: Client, sender: Worker, receiver: Worker, request_id: str) -> None:
    """Prefill there, decode here, and compare."""
    ids = a_sequence()
    first = await prefilled(client, sender, ids, request_id)
    start = a_decode(receiver, sender, first.overlay(ids), request_id)
    second = await client.start(receiver, start)
    assert (await second.rest())[-1] == "completed"
    assert (await first.rest())[-1] == "kv_sent"
    assert first.tokens() + second.tokens() == toy_answer(ids, BLOCK_0)


async def test_an_expired_transfer_loses_the_block_and_a_new_pair_works() -> None:
    settings = {"transfer_deadline_seconds": 0.3}
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


async def test_a_worker_that_starts_again_gets_a_new_pair_and_the_former_one_is_dropped() -> None:
    hub = LoopbackHub()
    async with a_worker(hub=hub, role=Role.PREFILL) as sender, a_client() as client:
        for life in ("first", "second"):
            async with a_worker(hub=hub, role=Role.DECODE, worker_id="phoenix") as receiver:
                await moves_a_block(client, sender, receiver, life)
        assert sender.exchange.num_pairs == 1


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


class Ended:
    """Stands for the GPU thread; notes how transfers ended."""

    def __init__(self) -> None:
        self.results: dict[BlockKey, Moved | LossReason] = {}

    def pin(self, key: BlockKey) -> "Future[tuple[int, ...] | None]":
        raise NotImplementedError

    def unpin(self, key: BlockKey) -> None:
        raise NotImplementedError

    def transfer_ended(self, key: BlockKey, result: Moved | LossReason) -> None:
        self.results[key] = result


async def test_a_fetch_that_is_given_up_before_it_could_begin_is_ended_too() -> None:
    async def ask_nobody(url: str, request: TransferRequest, seconds: float) -> TransferAccepted:
        raise AssertionError("nobody was to be asked")

    metrics, ended = WorkerMetrics(), Ended()
    pool = ToyPool()
    exchange = KVExchange(
        standing=Standing(worker_id="w", url="", model="small", role=Role.DECODE, metrics=metrics),
        blocks=ended,
        transport=LoopbackTransport(pool, LoopbackHub()),
        geometry=KVGeometry.of(pool),
        ask_sender=ask_nobody,
        metrics=metrics,
        deadline_seconds=10.0,
    )
    key = BlockKey(request_id="r", block=0)
    exchange.fetch(key, KVSource(worker_id="s", epoch="e", url="http://x"), (1, 2))
    exchange.give_up(key)
    await eventually(lambda: key in ended.results)
    result = ended.results[key]
    assert isinstance(result, LossReason)
    assert result.code == "cancelled"
    await exchange.close(1.0)


# -- the loopback keeps the protocol ------------------------------------------------------------


def connected(pools: tuple[ToyPool, ToyPool]) -> tuple[LoopbackHub, KVChannel, KVChannel]:
    hub = LoopbackHub()
    sender, receiver = (LoopbackTransport(pool, hub) for pool in pools)
    with ThreadPoolExecutor(1) as executor:
        other = executor.submit(sender.connect, Side.SENDER, "c", "", 5.0)
        here = receiver.connect(Side.RECEIVER, "c", receiver.offer(), 5.0)
        return hub, other.result(), here


def test_loopback_moves_pages_of_every_layer() -> None:
    source, target = ToyPool(), ToyPool()
    source.layers.copy_(torch.arange(source.layers.numel()).reshape(source.layers.shape))
    _, sender, receiver = connected((source, target))
    with ThreadPoolExecutor(1) as executor:
        sent = executor.submit(sender.send, (3, 1), 5.0)
        assert receiver.receive((0, 2), 5.0) == sent.result() == 2 * 2 * 2 * 16 * 2 * 4
    for layer in range(2):
        assert torch.equal(target.gather(layer, (0, 2)), source.gather(layer, (3, 1)))


def test_loopback_calls_end_when_aborted_cut_or_late() -> None:
    hub, sender, receiver = connected((ToyPool(), ToyPool()))
    with pytest.raises(TransferError, match="deadline"):
        receiver.receive((0,), 0.01)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(receiver.receive, (0,), 30.0)
        sender.abort()
        with pytest.raises(TransferError, match="aborted"):
            waiting.result(5)
    hub, sender, receiver = connected((ToyPool(), ToyPool()))
    hub.cut_all()
    with pytest.raises(TransferError, match="aborted"):
        sender.send((0,), 5.0)


def test_loopback_does_not_connect_alone() -> None:
    transport = LoopbackTransport(ToyPool(), LoopbackHub())
    with pytest.raises(TransferError, match="deadline"):
        transport.connect(Side.SENDER, "c", "", 0.01)
