"""The driver over a worker whose events come twice, or not at all: it is not believed."""

from collections import deque
from types import TracebackType
from typing import Self

import pytest
from tests.router.builders import driver, job, worker_client
from tests.router.stub_worker import StubWorker, say
from tests.router.test_driver import LONG, Client, cluster, prefill_and_decode

from sangam_core.wire import BlockEvent, BlockStart, KVArrived, PassRan, Prefilled, Refusal
from sangam_router.worker_client import BlockStream, WorkerClient


class Garbled:
    """A client that hears the first event of a kind twice, or not at all."""

    def __init__(self, workers: WorkerClient, kind: type[BlockEvent], num_times: int) -> None:
        self._workers = workers
        self._kind = kind
        self._num_times = num_times
        self.is_due = True

    async def open(self, url: str, start: BlockStart) -> BlockStream | Refusal:
        opened = await self._workers.open(url, start)
        return opened if isinstance(opened, Refusal) else GarbledStream(self, opened)

    def heard(self, event: BlockEvent) -> list[BlockEvent]:
        if not self.is_due or not isinstance(event, self._kind):
            return [event]
        self.is_due = False
        return [event] * self._num_times


class GarbledStream:
    def __init__(self, client: Garbled, stream: BlockStream) -> None:
        self._client = client
        self._stream = stream
        self._events: deque[BlockEvent] = deque()

    async def next_event(self) -> BlockEvent:
        while not self._events:
            self._events.extend(self._client.heard(await self._stream.next_event()))
        return self._events.popleft()

    def abort(self, reason: str) -> None:
        self._stream.abort(reason)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stream.__aexit__(kind, error, trace)


@pytest.mark.parametrize(
    ("kind", "num_times", "is_disaggregated"),
    [
        (Prefilled, 2, False),
        (PassRan, 2, False),
        (PassRan, 0, False),
        (KVArrived, 2, True),
        (KVArrived, 0, True),
    ],
)
async def test_a_worker_that_reports_out_of_turn_loses_the_block_and_nothing_else(
    kind: type[BlockEvent], num_times: int, is_disaggregated: bool
) -> None:
    workers: tuple[StubWorker, ...] = (StubWorker(answer=say(LONG)),)
    if is_disaggregated:
        workers = prefill_and_decode()
    client = Client()
    async with cluster(*workers) as (_, places), worker_client() as real:
        asked = Garbled(real, kind, num_times)
        answer = await driver(places, asked).run(job(max_tokens=96), client.emit)
    assert not asked.is_due
    assert client.text == LONG
    assert answer.timings.num_retries == 1
    positions = [d.commit.position for delta in client.deltas for d in delta.denoised]
    assert len(positions) == len(set(positions)), "no commit is told twice"
