"""The internal API over real sockets, with the toy engine."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from tests.worker.fakes import ToyEngine, ToyPool, toy_answer
from tests.worker.harness import TOKEN, a_client, a_sequence, a_start, a_worker, eventually

from sangam_core.answer import Completion
from sangam_core.decoding import Commit, Decoding, Resume
from sangam_core.wire import Completed, Lost, PassRan, Prefilled, Queued, WireGeometry

BLOCK_0 = range(20, 36)


async def test_a_block_runs_in_place_and_streams_every_event() -> None:
    async with a_worker() as worker, a_client() as client:
        run = await client.start(worker, a_start(worker))
        assert await run.rest() == ["queued", "prefilled", "pass", "pass", "completed"]
        assert run.tokens() == toy_answer(a_sequence(), BLOCK_0)
        passes = [event for event in run.events if isinstance(event, PassRan)]
        assert [event.step for event in passes] == [0, 1]
        assert [event.completion for event in passes] == [Completion.NOTHING, Completion.BLOCK]
        assert [event.carry for event in passes] == [8.0, 16.0]
        done = run.events[-1]
        assert isinstance(done, Completed)
        assert done.num_passes == 2
        assert await client.is_idle(worker)
