"""A worker's scheduler and engine without HTTP, kept busy with a fixed number of requests.

Decides when the next block or request is submitted: at once, in a closed loop. The scheduler
decides the iterations, the engine computes. Called by ``engine_throughput``.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sangam_core.answer import Completion
from sangam_core.decoding import Decoding
from sangam_core.geometry import Geometry
from sangam_core.wire import BlockKey, BlockStart, WireGeometry
from sangam_worker.block_state import block_state_from
from sangam_worker.plan import Outcome, Plan
from sangam_worker.scheduler import Scheduler


class Executes(Protocol):
    """The engine, as far as this loop knows it."""

    def execute(self, plan: Plan) -> Outcome:
        """Run one iteration."""
        ...


class CountingEngine:
    """Another engine, and how many iterations it ran."""

    def __init__(self, engine: Executes) -> None:
        self._engine = engine
        self.num_iterations = 0

    def execute(self, plan: Plan) -> Outcome:
        """Run one iteration."""
        self.num_iterations += 1
        return self._engine.execute(plan)


@dataclass(frozen=True, slots=True)
class Served:
    """One request's whole sequence, prompt included, and the passes that it took part in."""

    ids: list[int]
    num_passes: int


@dataclass(slots=True, eq=False)
class _Request:
    index: int
    geometry: Geometry
    ids: list[int]
    block: int = 0
    num_passes: int = 0


class ClosedLoop:
    """Keeps ``concurrency`` requests in flight until all are answered.

    Args:
        mask_id, vocab_size: the model's.
        num_blocks, block_length: the mask buffer that every request gets.
    """

    def __init__(
        self,
        engine: Executes,
        scheduler: Scheduler,
        *,
        mask_id: int,
        vocab_size: int,
        num_blocks: int,
        block_length: int,
        decoding: Decoding,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._mask_id = mask_id
        self._vocab_size = vocab_size
        self._num_blocks = num_blocks
        self._block_length = block_length
        self._decoding = decoding
        self._running: dict[BlockKey, _Request] = {}

    def serve(self, prompts: Sequence[Sequence[int]], concurrency: int) -> list[Served]:
        """Answer the prompts, in their order. Ends when the last answer is complete."""
        waiting = deque(self._request(index, prompt) for index, prompt in enumerate(prompts))
        answers: dict[int, Served] = {}
        while waiting or self._running:
            while waiting and len(self._running) < concurrency:
                self._submit(waiting.popleft())
            plan = self._scheduler.next_plan()
            assert plan is not None, "blocks are in flight, and the pool holds each of them"
            outcome = self._engine.execute(plan)
            for progress in self._scheduler.apply(outcome):
                request = self._running[progress.key]
                request.num_passes += 1
                for commit in progress.commits:
                    request.ids[commit.position] = commit.token
                if progress.completion is not Completion.NOTHING:
                    del self._running[progress.key]
                    self._go_on(request, progress.completion, answers)
        return [answers[index] for index in range(len(prompts))]

    def _request(self, index: int, prompt: Sequence[int]) -> _Request:
        geometry = Geometry(len(prompt), self._num_blocks, self._block_length)
        masks = [self._mask_id] * geometry.mask_buffer_tokens
        return _Request(index, geometry, [*prompt, *masks])

    def _go_on(self, request: _Request, completion: Completion, answers: dict[int, Served]) -> None:
        request.block += 1
        if completion is Completion.ANSWER or request.block == request.geometry.num_blocks:
            answers[request.index] = Served(request.ids, request.num_passes)
        else:
            self._submit(request)

    def _submit(self, request: _Request) -> None:
        key = BlockKey(request_id=f"request-{request.index:06}", block=request.block)
        start = BlockStart(
            key=key,
            worker_epoch="in-process",
            arrival_seconds=float(request.index),
            ids=tuple(request.ids),
            geometry=WireGeometry.of(request.geometry),
            decoding=self._decoding,
        )
        self._running[key] = request
        self._scheduler.submit(block_state_from(start, self._mask_id, self._vocab_size))
