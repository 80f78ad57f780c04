"""Runs golden cases over workers' internal APIs, block by block, as a router would."""

from contextlib import closing
from dataclasses import dataclass

import aiohttp
from tests.worker.harness import BlockRun

from sangam_core.answer import Completion
from sangam_core.decoding import Resume
from sangam_core.wire import (
    BlockEvent,
    BlockKey,
    BlockStart,
    Completed,
    HeldBlocks,
    KVSource,
    Lost,
    PassRan,
    WireGeometry,
)
from sangam_worker.verify import Case


class LostOnTheWay(Exception):
    """A block was lost; says why."""


@dataclass(frozen=True)
class Place:
    """A worker, known by its URL alone."""

    http: aiohttp.ClientSession
    url: str

    async def held(self) -> HeldBlocks:
        async with self.http.get(f"{self.url}/internal/v1/blocks") as response:
            return HeldBlocks.model_validate_json(await response.read())

    async def start(self, start: BlockStart) -> BlockRun:
        response = await self.http.post(
            f"{self.url}/internal/v1/blocks",
            data=start.model_dump_json(),
            headers={"content-type": "application/json"},
        )
        assert response.status == 200, await response.text()
        return BlockRun(response)


async def run_case(
    case: Case, prefill: Place, decode: Place | None = None, request_id: str | None = None
) -> tuple[int, ...]:
    """A case's whole sequence when it is done.

    Args:
        prefill: runs the prefills, and the decodes too without ``decode``.

    Raises:
        LostOnTheWay: a block was lost.
    """
    ids = [*case.prompt_ids, *[case.mask_id] * case.geometry.mask_buffer_tokens]
    for block in range(case.geometry.num_blocks):
        start = BlockStart(
            key=BlockKey(request_id=request_id or case.id, block=block),
            worker_epoch=(await prefill.held()).epoch,
            arrival_seconds=0.0,
            ids=tuple(ids),
            geometry=WireGeometry.of(case.geometry),
            decoding=case.decoding,
        )
        if decode is None:
            run = await prefill.start(start)
            with closing(run.response):
                await _follow(run, ids, Completed)
        else:
            await _split(start, ids, prefill, decode)
    return tuple(ids)


async def _split(start: BlockStart, ids: list[int], prefill: Place, decode: Place) -> None:
    """Prefill there, decode here."""
    first = await prefill.start(start.model_copy(update={"hands_over": True}))
    with closing(first.response):
        ran = await _follow(first, ids, PassRan)
        assert isinstance(ran, PassRan)
        if ran.completion is Completion.NOTHING:
            held = await prefill.held()
            resume = Resume(step=1, initial_masks=start.geometry.block_length, carry=ran.carry)
            there = {
                "worker_epoch": (await decode.held()).epoch,
                "ids": tuple(ids),
                "source": KVSource(worker_id=held.worker_id, epoch=held.epoch, url=prefill.url),
                "resume": resume,
            }
            second = await decode.start(start.model_copy(update=there))
            with closing(second.response):
                await _follow(second, ids, Completed)
        await first.rest()


async def _follow(run: BlockRun, ids: list[int], last: type[BlockEvent]) -> BlockEvent:
    """Overlay commits up to an event of a kind."""
    while True:
        event = await run.next()
        if isinstance(event, Lost):
            raise LostOnTheWay(f"{event.reason.code}: {event.reason.message}")
        if isinstance(event, PassRan):
            for commit in event.commits:
                ids[commit.position] = commit.token
        if isinstance(event, last):
            return event
