"""Drives cases through scheduler and engine, block by block, many at once.

A small stand-in for router and worker loop: it submits blocks, carries out plans, and with two
sites copies the KV from the prefill's pages to the decode's. What it leaves out is HTTP and time.
Called by ``__main__`` and tests.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sangam_core.answer import Completion
from sangam_core.decoding import Resume
from sangam_core.errors import EngineError
from sangam_core.wire import BlockKey, BlockStart, KVSource, WireGeometry
from sangam_worker.block_state import BlockState, Stage, block_state_from
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.description import ModelConfig
from sangam_worker.plan import Outcome, Pass, Plan
from sangam_worker.scheduler import Progress, Scheduler
from sangam_worker.verify.cases import Case, Forward, Write

_SOURCE = KVSource(worker_id="prefill", epoch="0", url="http://prefill.invalid")


class DrivenEngine(Protocol):
    """What a site needs of an engine."""

    @property
    def model_config(self) -> ModelConfig:
        """The model."""
        ...

    @property
    def kv_pool(self) -> KVPool:
        """Its pages."""
        ...

    def execute(self, plan: Plan) -> Outcome:
        """Run an iteration."""
        ...


@dataclass(frozen=True, slots=True)
class Ran:
    """What a case did."""

    case: Case
    output_ids: tuple[int, ...]
    forwards: tuple[Forward, ...]


@dataclass(slots=True, eq=False)
class _Running:
    """A case under way."""

    case: Case
    arrival: int
    ids: list[int]
    block: int = 0
    forwards: list[Forward] = field(default_factory=list)

    @property
    def key(self) -> BlockKey:
        return BlockKey(request_id=self.case.id, block=self.block)


class Site:
    """A scheduler and its engine: one worker's inside."""

    def __init__(self, engine: DrivenEngine, tau_tokens: int) -> None:
        self.engine = engine
        self.scheduler = Scheduler(
            mask_id=engine.model_config.mask_id,
            total_pages=engine.kv_pool.total_pages,
            tau_tokens=tau_tokens,
        )

    def iterate(self) -> Iterator[tuple[Pass, Progress]]:
        """Run one iteration, if anything can run."""
        plan = self.scheduler.next_plan()
        if plan is None:
            return
        outcome = self.engine.execute(plan)
        for item in outcome.passes:
            if item.error is not None:
                raise EngineError(item.error)
        yield from zip(plan.passes, self.scheduler.apply(outcome), strict=True)


class _Drive:
    """The run of one model's cases on one site, or on a prefill and a decode site."""

    def __init__(self, prefill: Site, decode: Site, in_flight: int) -> None:
        self._prefill, self._decode = prefill, decode
        self._in_flight = in_flight
        self._running: dict[str, _Running] = {}
        self._states: dict[str, BlockState] = {}
        self._holding: deque[str] = deque()

    def run(self, cases: Sequence[Case]) -> Iterator[Ran]:
        waiting = deque(enumerate(cases))
        while waiting or self._running:
            while waiting and len(self._running) < self._in_flight:
                arrival, case = waiting.popleft()
                masks = [case.mask_id] * case.geometry.mask_buffer_tokens
                running = _Running(case, arrival, [*case.prompt_ids, *masks])
                self._running[case.id] = running
                self._start_block(running)
            num_steps = 0
            for site in {id(site): site for site in (self._prefill, self._decode)}.values():
                for item, progress in site.iterate():
                    num_steps += 1
                    finished = self._follow(item, progress)
                    if finished is not None:
                        yield finished
            num_steps += self._hand_over()
            assert num_steps, "nothing can run, but cases are under way"

    def _start_block(self, running: _Running) -> None:
        """Begin a block; cases without KV to move run where the decodes are."""
        is_moved = self._prefill is not self._decode and running.case.decoding.cache != "none"
        site = self._prefill if is_moved else self._decode
        state = self._state(self._block_start(running, hands_over=is_moved), site)
        self._states[running.case.id] = state
        site.scheduler.submit(state)

    def _block_start(self, running: _Running, *, hands_over: bool = False) -> BlockStart:
        return BlockStart(
            key=running.key,
            worker_epoch="0",
            arrival_seconds=float(running.arrival),
            ids=tuple(running.ids),
            geometry=WireGeometry.of(running.case.geometry),
            decoding=running.case.decoding,
            hands_over=hands_over,
        )

    def _state(self, start: BlockStart, site: Site) -> BlockState:
        config = site.engine.model_config
        return block_state_from(start, config.mask_id, config.vocab_size)

    def _follow(self, item: Pass, progress: Progress) -> Ran | None:
        running = self._running[progress.key.request_id]
        running.ids = list(self._states[running.case.id].ids)
        running.forwards.append(
            Forward(
                block=item.block_index,
                start=item.positions[0],
                num_rows=len(item.positions),
                writes=tuple(
                    Write(commit.position, commit.token, commit.confidence)
                    for commit in progress.commits
                ),
            )
        )
        if progress.stage is Stage.HOLDING:
            self._holding.append(running.case.id)
        if progress.completion is Completion.NOTHING:
            return None
        running.block += 1
        is_last = running.block == running.case.geometry.num_blocks
        if progress.completion is Completion.BLOCK and not is_last:
            self._start_block(running)
            return None
        del self._running[running.case.id], self._states[running.case.id]
        return Ran(running.case, tuple(running.ids), tuple(running.forwards))

    def _hand_over(self) -> int:
        """Move prefilled blocks while the decode site has pages; how many were moved."""
        num_moved = 0
        while self._holding:
            running = self._running[self._holding[0]]
            sent = self._states[running.case.id]
            resume = Resume(step=sent.step, initial_masks=sent.initial_masks, carry=sent.carry)
            start = self._block_start(running).model_copy(
                update={"source": _SOURCE, "resume": resume}
            )
            state = self._state(start, self._decode)
            if not self._decode.scheduler.reserve(state):
                break
            self._copy_kv(running.key)
            self._decode.scheduler.arrived(running.key)
            self._prefill.scheduler.remove(running.key)
            self._states[running.case.id] = state
            self._holding.popleft()
            num_moved += 1
        return num_moved

    def _copy_kv(self, key: BlockKey) -> None:
        sent = self._prefill.scheduler.pages_of(key)
        received = self._decode.scheduler.pages_of(key)
        source, target = self._prefill.engine.kv_pool, self._decode.engine.kv_pool
        for layer in range(source.num_layers):
            target.scatter(layer, received, source.gather(layer, sent))


def run_cases(
    cases: Sequence[Case],
    prefill: DrivenEngine,
    decode: DrivenEngine | None = None,
    *,
    in_flight: int = 1,
    tau_tokens: int = 512,
) -> Iterator[Ran]:
    """Run cases of one model in the given order, ``in_flight`` at once; each as it finishes.

    Args:
        prefill: the only engine, or with ``decode`` the one that prefills.
        decode: decodes there, after copying the KV (cases without a cache run there altogether).
    """
    first = Site(prefill, tau_tokens)
    second = first if decode is None else Site(decode, tau_tokens)
    yield from _Drive(first, second, in_flight).run(cases)
