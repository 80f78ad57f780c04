"""Drives simulated requests block by block: what a router's driver does, under virtual time.

Feeds the lifecycle its events and carries out its commands; keeps where the time goes. Where a
block runs is placement's decision, when the scheduler's, how long the cost model's. Called by
``simulate``; called back by the workers.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sangam_core.answer import Completion
from sangam_core.decoding import Decoding, EosRule
from sangam_core.geometry import Geometry
from sangam_core.lifecycle import Command, Event, Request, advance
from sangam_core.placement import Demand, Role
from sangam_core.wire import BlockKey
from sangam_loadtest.costs.model import CostModel
from sangam_loadtest.load import Due
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.simulator.clock import VirtualClock
from sangam_loadtest.simulator.commits import CommitCounts
from sangam_loadtest.simulator.fleet import Fleet
from sangam_loadtest.simulator.system import System
from sangam_loadtest.simulator.tokens import EOS_ID, MASK_ID, WORD_ID
from sangam_loadtest.simulator.worker import BlockFuture, SimulatedWorker
from sangam_worker.block_state import BlockState, Stage
from sangam_worker.scheduler import Progress
from sangam_worker.strategies import strategy_named

_DECODING = Decoding(eos_ids=(EOS_ID,), eos_rule=EosRule.END)
_DUAL = strategy_named(_DECODING.cache)
_END_IDS = frozenset(_DECODING.eos_ids)


@dataclass(slots=True)
class Times:
    """Where a request's time went, over its blocks."""

    prefill_queueing_seconds: float = 0.0
    decode_queueing_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    transfer_seconds: float = 0.0
    first_token_seconds: float | None = None


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request under way.

    Attributes:
        since_seconds: when the part of its latency that runs now began.
        state: the current block, as the worker that runs it has it.
        prefiller, decoder: the workers of the current block.
    """

    due: Due
    request: Request
    demand: Demand
    rng: random.Random
    times: Times = field(default_factory=Times)
    since_seconds: float = 0.0
    num_steps: int = 0
    num_blocks: int = 0
    key: BlockKey | None = None
    future: BlockFuture | None = None
    state: BlockState | None = None
    prefiller: int = -1
    decoder: int = -1
    num_sides_done: int = 0
    commit_counts: list[list[int]] = field(default_factory=list)
    placements: list[list[str]] = field(default_factory=list)


class SimulatedDriver:
    """Drives every request of a simulation.

    Args:
        finished: takes the record of each request as it ends.
        keeps_commits: whether records tell the commits of each pass.
    """

    def __init__(
        self,
        system: System,
        costs: CostModel,
        commits: CommitCounts,
        clock: VirtualClock,
        finished: Callable[[RequestRecord], None],
        *,
        keeps_commits: bool = False,
    ) -> None:
        self.fleet = Fleet(system)
        self.workers: Sequence[SimulatedWorker] = ()
        self._system = system
        self._costs = costs
        self._commits = commits
        self._clock = clock
        self._finished = finished
        self._keeps_commits = keeps_commits
        self._running: dict[str, SimulatedRequest] = {}
        self._sends_from: dict[int, float] = {}
        self._receives_from: dict[int, float] = {}

    @property
    def num_under_way(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._running)

    def submit(self, due: Due, geometry: Geometry, seed: int) -> None:
        """A request has arrived (now)."""
        name = f"request-{due.index:07d}"
        request = Request(name, self._clock.now, geometry)
        num_pages = self._system.total_pages if self._system.is_batch_one else geometry.num_pages
        run = SimulatedRequest(
            due,
            request,
            Demand(name, geometry.total_tokens, num_pages),
            random.Random(seed * 1_000_003 + due.index),
        )
        self._running[name] = run
        self._ask_prefill(run)

    def given_up(self, error: str) -> list[RequestRecord]:
        """Records of the requests that are still under way."""
        return [RequestRecord(**_identity(run), error=error) for run in self._running.values()]

    # -- commands -----------------------------------------------------------------------------

    def _ask_prefill(self, run: SimulatedRequest) -> None:
        run.since_seconds = self._clock.now
        demand = run.demand if run.request.block else replace(run.demand, is_new=True)
        self.fleet.ask_prefill(run.request.order, demand, partial(self._prefill_placed, run))

    def _prefill_placed(self, run: SimulatedRequest, worker: int) -> None:
        request = run.request
        advance(request, Event.PREFILL_PLACED)
        run.prefiller = worker
        run.placements.append([f"worker-{worker}"])
        self._clock.after(self._costs.host_seconds_per_request, partial(self._start_prefill, run))

    def _start_prefill(self, run: SimulatedRequest) -> None:
        request, geometry = run.request, run.request.geometry
        start = geometry.block_start(request.block)
        worker = self.workers[run.prefiller]
        run.key = BlockKey.model_construct(
            request_id=request.request_id, block=request.block, attempt=request.attempt
        )
        run.future = BlockFuture(
            self._commits.draw(run.rng, geometry.block_length, request.block),
            geometry.prompt_tokens + run.due.request.output_tokens,
        )
        ids = [WORD_ID] * start + [MASK_ID] * (geometry.total_tokens - start)
        run.state = self._block_state(run, ids, hands_over=worker.role is Role.PREFILL)
        if self._keeps_commits:
            run.commit_counts.append([])
        worker.submit(run.state, run.future)

    def _block_state(
        self, run: SimulatedRequest, ids: list[int], *, hands_over: bool, step: int = 0
    ) -> BlockState:
        assert run.key is not None
        request = run.request
        return BlockState(
            key=run.key,
            arrival_seconds=request.arrival_seconds,
            geometry=request.geometry,
            decoding=_DECODING,
            strategy=_DUAL,
            ids=ids,
            initial_masks=request.geometry.block_length,
            step=step,
            hands_over=hands_over,
            eos_ids=_END_IDS,
        )

    def _ask_decode(self, run: SimulatedRequest) -> None:
        run.since_seconds = self._clock.now
        self.fleet.ask_decode(run.request.order, run.demand, partial(self._decode_placed, run))

    def _decode_placed(self, run: SimulatedRequest, worker: int) -> None:
        advance(run.request, Event.DECODE_PLACED)
        run.decoder = worker
        run.placements[-1].append(f"worker-{worker}")
        self._clock.after(self._costs.host_seconds_per_request, partial(self._start_transfer, run))

    def _start_transfer(self, run: SimulatedRequest) -> None:
        """Pages are taken, then the KV moves, behind what the links on both sides are busy with."""
        assert run.state is not None
        assert run.future is not None
        now = self._clock.now
        run.times.decode_queueing_seconds += now - run.since_seconds
        run.since_seconds = now
        sender, receiver = self.workers[run.prefiller], self.workers[run.decoder]
        state = self._block_state(run, run.state.ids, hands_over=False, step=run.state.step)
        state.carry = run.state.carry
        run.state = state
        receiver.reserve(state, run.future)
        cost = self._costs.transfer(run.request.geometry.total_tokens)
        if cost.is_blocking:
            one_side = partial(self._side_done, run)
            sender.block(cost.latency_seconds, one_side)
            receiver.block(cost.latency_seconds, one_side)
            return
        # Each side's link works off its own queue; neither idles because the other is busy.
        sent = max(now, self._sends_from.get(sender.number, 0.0)) + cost.latency_seconds
        received = max(now, self._receives_from.get(receiver.number, 0.0)) + cost.latency_seconds
        self._sends_from[sender.number], self._receives_from[receiver.number] = sent, received
        sender.take_time(cost.busy_seconds)
        receiver.take_time(cost.busy_seconds)
        self._clock.at(max(sent, received), partial(self._kv_arrived, run))

    def _side_done(self, run: SimulatedRequest) -> None:
        """One side of a blocking transfer is through; the KV is there once both are."""
        run.num_sides_done += 1
        if run.num_sides_done == 2:
            run.num_sides_done = 0
            self._kv_arrived(run)

    def _kv_arrived(self, run: SimulatedRequest) -> None:
        assert run.key is not None
        now = self._clock.now
        advance(run.request, Event.KV_ARRIVED)
        run.times.transfer_seconds += now - run.since_seconds
        run.since_seconds = now
        self.workers[run.prefiller].remove(run.key)
        self.fleet.release(run.prefiller, pages=run.demand.num_pages)
        self.workers[run.decoder].arrived(run.key)

    # -- what workers report ------------------------------------------------------------------

    def passed(self, worker: int, progress: Progress, started: float, ended: float) -> None:
        """A pass has run (now)."""
        run = self._running[progress.key.request_id]
        run.num_steps += 1
        if self._keeps_commits:
            run.commit_counts[-1].append(len(progress.commits))
        if run.times.first_token_seconds is None:
            run.times.first_token_seconds = ended - run.request.arrival_seconds
        if progress.step == 0:
            self._prefilled(run, progress, started, ended)
        elif progress.is_first_here:
            run.times.decode_queueing_seconds += started - run.since_seconds
            run.since_seconds = started
        if progress.completion is not Completion.NOTHING:
            self._block_over(run, worker, progress, ended)

    def _prefilled(
        self, run: SimulatedRequest, progress: Progress, started: float, ended: float
    ) -> None:
        run.times.prefill_queueing_seconds += started - run.since_seconds
        run.times.prefill_seconds += ended - started
        run.since_seconds = ended
        is_held = progress.stage is Stage.HOLDING
        if is_held:
            advance(run.request, Event.PREFILLED_FOR_TRANSFER)
        elif progress.completion is Completion.NOTHING:
            advance(run.request, Event.PREFILLED_IN_PLACE)
        self.fleet.release(run.prefiller, tokens=run.demand.cost_tokens)
        if is_held:
            self._ask_decode(run)

    def _block_over(
        self, run: SimulatedRequest, worker: int, progress: Progress, ended: float
    ) -> None:
        run.times.decode_seconds += ended - run.since_seconds
        run.num_blocks += 1
        is_answer = progress.completion is Completion.ANSWER
        event = Event.ANSWER_COMPLETE if is_answer else Event.BLOCK_COMPLETE
        is_finished = advance(run.request, event) is Command.FINISH
        if is_finished:
            self._finish(run, ended)
        elif self._system.is_batch_one:
            self._ask_prefill(run)  # before its place is free, which no younger one may take
        self.fleet.release(worker, pages=run.demand.num_pages)
        if not is_finished and not self._system.is_batch_one:
            self._ask_prefill(run)

    def _finish(self, run: SimulatedRequest, ended: float) -> None:
        del self._running[run.request.request_id]
        arrival, times = run.request.arrival_seconds, run.times
        self._finished(
            RequestRecord(
                **_identity(run),
                latency_seconds=ended - arrival,
                first_token_seconds=times.first_token_seconds,
                server_latency_seconds=ended - arrival,
                queueing_seconds=times.prefill_queueing_seconds + times.decode_queueing_seconds,
                prefill_queueing_seconds=times.prefill_queueing_seconds,
                decode_queueing_seconds=times.decode_queueing_seconds,
                prefill_seconds=times.prefill_seconds,
                decode_seconds=times.decode_seconds,
                transfer_seconds=times.transfer_seconds,
                num_blocks=run.num_blocks,
                num_steps=run.num_steps,
                num_retries=0,
                placements=run.placements,
                commit_counts=run.commit_counts,
            )
        )


def _identity(run: SimulatedRequest) -> dict[str, Any]:
    """What a record says of a request whatever became of it."""
    return {
        "index": run.due.index,
        "scheduled_seconds": run.due.at_seconds,
        "sent_seconds": run.due.at_seconds,
        "prompt_tokens": run.due.request.prompt_tokens,
        "output_tokens": run.due.request.output_tokens,
        "is_warmup": run.due.is_warmup,
    }
