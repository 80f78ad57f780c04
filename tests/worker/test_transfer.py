"""KV on its way between two workers, and what is refused: the exchange and the internal API."""

import asyncio

from tests.worker.fakes import ToyEngine, ToyPool, toy_answer
from tests.worker.harness import (
    Client,
    a_client,
    a_decode,
    a_sequence,
    a_start,
    a_worker,
    eventually,
)
from tests.worker.worker_pairs import BLOCK_0, is_lost, prefilled, two_workers

from sangam_core.decoding import Resume
from sangam_core.placement import Role
from sangam_core.wire import KVArrived
from sangam_worker.process import Worker
from sangam_worker.transfer.pool import KVGeometry
from sangam_worker.transfer.wire import TransferRequest


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
