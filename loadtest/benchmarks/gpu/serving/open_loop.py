"""Requests that come when they are due, driven block by block through a worker's loop, no HTTP.

Decides when a request's next block is submitted (at once, in its arrival's place in the queue) and
what is recorded of it. The loop, scheduler and engine are a worker's own. Called by ``rates``.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from random import Random

from sangam_core.decoding import Decoding, EosRule
from sangam_core.errors import SangamError
from sangam_core.geometry import Geometry
from sangam_core.wire import (
    BlockEvent,
    BlockKey,
    BlockStart,
    Completed,
    Lost,
    PassRan,
    WireGeometry,
)
from sangam_loadtest.traces.request import TraceRequest
from sangam_worker.block_state import block_state_from
from sangam_worker.loop import EngineLoop
from sangam_worker.models.description import ModelConfig

Notice = tuple[BlockKey, BlockEvent]
"""One event of one block."""

_IGNORES_EOS = Decoding(eos_rule=EosRule.IGNORE)
_TOKENS_BELOW = 1000
_LONGEST_PAUSE = 0.5
_DEADLINE_SECONDS = 3600.0


class BlockLost(SangamError):
    """The loop lost a block, so that latencies mean nothing."""


@dataclass(slots=True, eq=False)
class Request:
    """One request under way.

    Attributes:
        due_seconds: since the run began. num_blocks: that it asks for; the mask buffer may have
            more. service_seconds: latency without waiting to be let in.
    """

    index: int
    due_seconds: float
    geometry: Geometry
    num_blocks: int
    ids: list[int]
    block: int = 0
    num_passes: int = 0
    begun_seconds: float = 0.0
    latency_seconds: float | None = None
    service_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """How requests are laid out.

    Attributes:
        mask_buffer_tokens: L of every request, as the paper has it; ``None``: the output, rounded
            up to whole blocks. A request runs the blocks that hold its output.
    """

    config: ModelConfig
    block_length: int
    mask_buffer_tokens: int | None = None

    def num_blocks(self, asked: TraceRequest) -> int:
        """Blocks that hold the output."""
        return -(-asked.output_tokens // self.block_length)

    def geometry(self, asked: TraceRequest) -> Geometry:
        """Prompt and mask buffer."""
        buffer = self.mask_buffer_tokens or self.num_blocks(asked) * self.block_length
        return Geometry(asked.prompt_tokens, buffer // self.block_length, self.block_length)

    def request(self, index: int, due_seconds: float, asked: TraceRequest) -> Request:
        """A request for a trace's line, its prompt made up."""
        geometry = self.geometry(asked)
        random = Random(index)
        below = min(_TOKENS_BELOW, self.config.mask_id)
        ids = [random.randrange(below) for _ in range(asked.prompt_tokens)]
        ids += [self.config.mask_id] * geometry.mask_buffer_tokens
        return Request(index, due_seconds, geometry, self.num_blocks(asked), ids)


class Driver:
    """Sends requests into a loop, on the caller's thread.

    Args:
        most_in_flight: more than so many wait outside, in order; 1 is batch-1 serving.
        clock: monotonic seconds.

    Attributes:
        elapsed_seconds: since the run began, as of the last event.
        finished: requests that were answered, in that order. num_tokens: committed.
    """

    def __init__(
        self,
        config: ModelConfig,
        most_in_flight: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._most_in_flight, self._clock = config, most_in_flight, clock
        self._events: SimpleQueue[tuple[float, Sequence[Notice]]] = SimpleQueue()
        self._running: dict[BlockKey, Request] = {}
        self._waiting: deque[Request] = deque()
        self._started = 0.0
        self.elapsed_seconds = 0.0
        self.finished: list[Request] = []
        self.num_tokens = 0

    @property
    def num_in_flight(self) -> int:
        """Requests that have come and not been answered."""
        return len(self._running) + len(self._waiting)

    def publish(self, batch: Sequence[Notice]) -> None:
        """Take the loop's events, on its thread, which has better things to do."""
        self._events.put((self._clock(), batch))

    def run(
        self, loop: EngineLoop, requests: Sequence[Request], is_over: Callable[["Driver"], bool]
    ) -> None:
        """Send each request when it is due, until all are answered or ``is_over`` says so.

        Raises:
            BlockLost: the loop lost a block, or does not run any more.
        """
        self._started = self._clock()
        coming = deque(requests)
        while (coming or self.num_in_flight) and not is_over(self):
            now = self.elapsed_seconds = self._clock() - self._started
            while coming and coming[0].due_seconds <= now:
                self._waiting.append(coming.popleft())
            self._let_in(loop)
            pause = coming[0].due_seconds - now if coming else _LONGEST_PAUSE
            self._take_events(loop, max(0.0, min(pause, _LONGEST_PAUSE)))
            if (ailment := loop.ailment()) is not None:
                raise BlockLost(ailment)

    def _take_events(self, loop: EngineLoop, wait_seconds: float) -> None:
        try:
            at, batch = self._events.get(timeout=wait_seconds)
        except Empty:
            return
        self.elapsed_seconds = at - self._started
        for key, event in batch:
            self._take(loop, key, event)

    def _let_in(self, loop: EngineLoop) -> None:
        while self._waiting and len(self._running) < self._most_in_flight:
            self._submit(loop, self._waiting.popleft())

    def _take(self, loop: EngineLoop, key: BlockKey, event: BlockEvent) -> None:
        if isinstance(event, Lost):
            raise BlockLost(f"{key}: {event.reason.message}")
        if isinstance(event, PassRan):
            request = self._running[key]
            request.num_passes += 1
            self.num_tokens += len(event.commits)
            for commit in event.commits:
                request.ids[commit.position] = commit.token
        elif isinstance(event, Completed):
            request = self._running.pop(key)
            request.block += 1
            if request.block < request.num_blocks:
                self._submit(loop, request)
            else:
                request.latency_seconds = self.elapsed_seconds - request.due_seconds
                request.service_seconds = self.elapsed_seconds - request.begun_seconds
                self.finished.append(request)

    def _submit(self, loop: EngineLoop, request: Request) -> None:
        if not request.block:
            request.begun_seconds = self._clock() - self._started
        key = BlockKey(request_id=f"request-{request.index:06}", block=request.block)
        start = BlockStart(
            key=key,
            worker_epoch="in-process",
            arrival_seconds=request.due_seconds,
            ids=tuple(request.ids),
            geometry=WireGeometry.of(request.geometry),
            decoding=_IGNORES_EOS,
        )
        self._running[key] = request
        state = block_state_from(start, self._config.mask_id, self._config.vocab_size)
        loop.submit(state, deadline_seconds=_DEADLINE_SECONDS)
