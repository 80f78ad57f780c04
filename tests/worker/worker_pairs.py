"""A prefill worker and a decode worker, over the loopback, and blocks that move between them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.worker.fakes import GatedTransport, toy_answer
from tests.worker.harness import BlockRun, Client, a_client, a_decode, a_sequence, a_start, a_worker
from tests.worker.loopback import LoopbackHub, LoopbackTransport

from sangam_core.placement import Role
from sangam_core.wire import Lost, PassRan
from sangam_worker.process import Worker
from sangam_worker.transfer.pool import KVPool

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
