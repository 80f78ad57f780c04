"""Workers in the test's own process, with real sockets, and builders for what they are told."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tests.worker.fakes import MASK_ID, ToyEngine
from tests.worker.loopback import LoopbackHub, LoopbackTransport

from sangam_core.decoding import Commit, Decoding, Resume
from sangam_core.wire import (
    BLOCK_EVENT,
    TOKEN_HEADER,
    BlockEvent,
    BlockKey,
    BlockStart,
    HeldBlocks,
    KVSource,
    PassRan,
    Ping,
    WireGeometry,
)
from sangam_worker.process import Worker
from sangam_worker.settings import WorkerSettings
from sangam_worker.transfer.pool import KVPool
from sangam_worker.transfer.protocol import KVTransport

TOKEN = "secret"
DEADLINE_SECONDS = 20.0
NO_REDIS = "redis://127.0.0.1:1/0"

MakeTransport = Callable[[KVPool], KVTransport]


def a_settings(**changes: Any) -> WorkerSettings:
    """Settings for a worker that a test talks to; Redis is away unless named."""
    values: dict[str, Any] = {
        "internal_token": TOKEN,
        "redis_url": NO_REDIS,
        "transfer_deadline_seconds": 10.0,
        "drain_deadline_seconds": 10.0,
    }
    return WorkerSettings(**values | changes)


def a_sequence(prompt_tokens: int = 20, num_blocks: int = 2, block_length: int = 16) -> list[int]:
    """A prompt of distinct tokens, then masks."""
    return [10 + i for i in range(prompt_tokens)] + [MASK_ID] * (num_blocks * block_length)


def a_start(worker: Worker, request_id: str = "r1", **changes: Any) -> BlockStart:
    """A block start that the worker takes: block 0 of two, prompt of 20 tokens."""
    ids = changes.pop("ids", None) or a_sequence()
    block = changes.pop("block", 0)
    values: dict[str, Any] = {
        "key": BlockKey(request_id=request_id, block=block, attempt=1),
        "worker_epoch": worker.standing.epoch,
        "arrival_seconds": 1.0,
        "ids": tuple(ids),
        "geometry": WireGeometry(prompt_tokens=20, num_blocks=2, block_length=16),
        "decoding": Decoding(),
    }
    return BlockStart(**values | changes)


def a_decode(
    worker: Worker, sender: Worker, ids: Sequence[int], request_id: str = "r1", **changes: Any
) -> BlockStart:
    """A start that goes on after pass 0, with the KV that ``sender`` holds."""
    num_masks = 16
    values: dict[str, Any] = {
        "ids": list(ids),
        "source": KVSource(
            worker_id=sender.standing.worker_id, epoch=sender.standing.epoch, url=sender.url
        ),
        "resume": Resume(step=1, initial_masks=num_masks),
    }
    return a_start(worker, request_id, **values | changes)


@dataclass
class BlockRun:
    """A block's stream as it is read."""

    response: aiohttp.ClientResponse
    events: list[BlockEvent] = field(default_factory=list)

    async def next(self) -> BlockEvent:
        """The next event that is not a ping."""
        while True:
            event = await self.next_line()
            if not isinstance(event, Ping):
                return event

    async def next_line(self) -> BlockEvent:
        """The next event, pings included."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            line = await self.response.content.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError(f"the stream ended early, with {line!r}")
        event = BLOCK_EVENT.validate_json(line)
        self.events.append(event)
        return event

    async def until(self, kind: type) -> BlockEvent:
        """Read on to the first event of a kind."""
        while not isinstance(event := await self.next(), kind):
            pass
        return event

    async def rest(self) -> list[str]:
        """Read to the end; every event's type so far, pings apart."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            async for line in self.response.content:
                self.events.append(BLOCK_EVENT.validate_json(line))
        return self.types

    @property
    def types(self) -> list[str]:
        return [event.type for event in self.events if not isinstance(event, Ping)]

    @property
    def commits(self) -> list[Commit]:
        """Every commit so far, in order."""
        passes = [event for event in self.events if isinstance(event, PassRan)]
        return [commit for event in passes for commit in event.commits]

    def tokens(self) -> list[int]:
        """The committed tokens by position."""
        return [c.token for c in sorted(self.commits, key=lambda c: c.position)]

    def overlay(self, ids: Sequence[int]) -> list[int]:
        """A sequence with what has been committed so far."""
        out = list(ids)
        for commit in self.commits:
            out[commit.position] = commit.token
        return out


class Client:
    """Talks to workers as a router does."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.http = session

    async def start(self, worker: Worker, start: BlockStart) -> BlockRun:
        """Start a block that must be taken."""
        response = await self.post(worker, "/internal/v1/blocks", start.model_dump_json())
        assert response.status == 200, await response.text()
        return BlockRun(response)

    async def refused(self, worker: Worker, body: BlockStart | str) -> tuple[int, dict[str, Any]]:
        """Start a block that must not be taken: status and body of the answer."""
        text = body if isinstance(body, str) else body.model_dump_json()
        async with await self.post(worker, "/internal/v1/blocks", text) as response:
            assert response.status != 200
            return response.status, await response.json()

    async def post(
        self, worker: Worker, path: str, body: str | bytes = ""
    ) -> aiohttp.ClientResponse:
        headers = {"content-type": "application/json"}
        return await self.http.post(worker.url + path, data=body, headers=headers)

    async def get(self, worker: Worker, path: str) -> tuple[int, Any]:
        async with self.http.get(worker.url + path) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text

    async def held(self, worker: Worker) -> HeldBlocks:
        status, body = await self.get(worker, "/internal/v1/blocks")
        assert status == 200, body
        return HeldBlocks.model_validate(body)

    async def metric(self, worker: Worker, sample: str) -> float:
        """A sample by its full name with labels, 0 when it is absent."""
        _, text = await self.get(worker, "/metrics")
        for line in text.splitlines():
            if line.startswith(sample + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    async def is_idle(self, worker: Worker) -> bool:
        held = await self.held(worker)
        return not held.blocks and held.free_pages == held.total_pages

    async def becomes_idle(self, worker: Worker) -> None:
        """Wait until the worker holds nothing."""
        await eventually(lambda: self.is_idle(worker))


async def eventually(is_met: Callable[[], Awaitable[bool] | bool]) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        met = is_met()
        if met if isinstance(met, bool) else await met:
            return
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def a_worker(
    engine: ToyEngine | None = None,
    *,
    hub: LoopbackHub | None = None,
    make_transport: MakeTransport | None = None,
    **settings: Any,
) -> AsyncIterator[Worker]:
    """A worker that serves; stopped at the end."""
    shared = hub or LoopbackHub()
    worker = Worker(
        a_settings(**settings),
        engine or ToyEngine(),
        make_transport or (lambda pool: LoopbackTransport(pool, shared)),
    )
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


@asynccontextmanager
async def a_client() -> AsyncIterator[Client]:
    """A client with the right token."""
    async with aiohttp.ClientSession(headers={TOKEN_HEADER: TOKEN}) as session:
        yield Client(session)
