"""One request under way: its phase, its answer, where its time goes, what it asks of workers.

The bookkeeping half of the driver: no I/O, no waiting. ``driver`` calls it around every step.
"""

from collections.abc import Callable

from sangam_core.decoding import Resume
from sangam_core.errors import BlockLost, IllegalTransition
from sangam_core.lifecycle import TRANSITIONS, Command, Event, Request, advance
from sangam_core.placement import Demand, Role
from sangam_core.rules import keeps_kv
from sangam_core.wire import (
    BlockKey,
    BlockStart,
    KVArrived,
    KVSource,
    PassRan,
    Prefilled,
    WireGeometry,
)
from sangam_router.answer_state import AnswerState
from sangam_router.job import Emit, Job, Timings
from sangam_router.metrics import RouterMetrics
from sangam_router.places import Place
from sangam_router.text_stream import Decode


class Run:
    """A request's state between two steps of the driver.

    Args:
        decode: ids to text. clock: monotonic seconds.
        deadline: when the request is over, on that clock.
    """

    def __init__(
        self,
        job: Job,
        emit: Emit,
        *,
        mask_id: int,
        decode: Decode,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        deadline: float,
    ) -> None:
        geometry = job.geometry
        has_kv = keeps_kv(job.decoding.cache)
        self.job = job
        self.request = Request(job.request_id, job.arrival_seconds, geometry)
        self.answer = AnswerState(job, mask_id, decode)
        self.demand = Demand(
            request_id=job.request_id,
            cost_tokens=geometry.total_tokens,
            num_pages=geometry.num_pages if has_kv else 0,
            needs_colocated=not has_kv,
        )
        self.timings = Timings()
        self._block_decode_seconds = 0.0
        self.avoid: set[str] = set()
        self.num_failures_in_row = 0
        self._emit = emit
        self._metrics = metrics
        self._clock = clock
        self._started = clock()
        self._deadline = deadline
        self._geometry = WireGeometry.of(geometry)

    def advance(self, event: Event) -> Command:
        """Move the request on; says what comes next."""
        return advance(self.request, event)

    def reported(self, event: Event) -> Command:
        """Move the request on by what a worker says.

        Raises:
            BlockLost: it cannot be so now: the worker cannot be trusted with the block.
        """
        try:
            return self.advance(event)
        except IllegalTransition as error:
            raise BlockLost(f"reported out of turn: {error}") from None

    def end(self, event: Event) -> None:
        """Move the request to a final phase unless it is in one."""
        if not self.request.phase.is_final:
            self.advance(event)

    @property
    def is_new(self) -> bool:
        """Whether no worker has had anything of the request yet."""
        return self.request.block == 0 and self.request.attempt == 0

    # -- what goes to workers ---------------------------------------------------------------

    def prefill_start(self, place: Place) -> BlockStart:
        """The current block from its start, or from where it was lost."""
        return self._start(
            place,
            ids=self.answer.ids_at_block_start(),
            resume=self.answer.restart(),
            hands_over=place.role is Role.PREFILL,
        )

    def decode_start(self, place: Place, sender: Place) -> BlockStart:
        """The current block as it stands, its KV to be fetched from ``sender``."""
        return self._start(
            place,
            ids=tuple(self.answer.ids),
            resume=self.answer.moved(),
            source=KVSource(worker_id=sender.worker_id, epoch=sender.epoch, url=sender.url),
        )

    def _start(
        self,
        place: Place,
        *,
        ids: tuple[int, ...],
        resume: Resume | None,
        hands_over: bool = False,
        source: KVSource | None = None,
    ) -> BlockStart:
        request = self.request
        return BlockStart(
            key=BlockKey(
                request_id=request.request_id, block=request.block, attempt=request.attempt
            ),
            worker_epoch=place.epoch,
            arrival_seconds=request.arrival_seconds,
            ids=ids,
            geometry=self._geometry,
            decoding=self.job.decoding,
            hands_over=hands_over,
            source=source,
            resume=resume,
            deadline_seconds=max(1.0, self._deadline - self._clock()),
        )

    # -- what happens -----------------------------------------------------------------------

    def placed(self, place: Place, waited_seconds: float, stage: str) -> None:
        """A place was reserved after a wait."""
        placements = self.timings.placements
        if len(placements) <= self.request.block:
            placements.append([])
        placements[self.request.block].append(place.worker_id)
        self._queued(waited_seconds, is_decode=stage == "decode")
        self._metrics.place_wait.observe(waited_seconds)
        self._metrics.dispatches.labels(stage, place.role.value).inc()

    def prefilled(self, event: Prefilled) -> None:
        """The prefill's iteration has run."""
        self._queued(event.queue_seconds)
        self.timings.prefill_seconds += event.prefill_seconds
        self._metrics.prefill_queueing.observe(event.queue_seconds)
        self._metrics.prefill.observe(event.prefill_seconds)

    def kv_arrived(self, event: KVArrived) -> None:
        """The block's KV has moved."""
        self.timings.transfer_seconds += event.transfer_seconds
        self._metrics.kv_transfer.observe(event.transfer_seconds)
        self._metrics.kv_transfer_bytes.inc(event.num_bytes)

    def passed(self, event: PassRan) -> Event | None:
        """A pass ran: its text goes out. Returns what it completed, if anything.

        Raises:
            BlockLost: the worker reports what cannot be.
        """
        answer = self.answer
        if (self.request.phase, Event.BLOCK_COMPLETE) not in TRANSITIONS:
            raise BlockLost(f"pass {event.step} reported while {self.request.phase}")
        delta = answer.apply(event)
        self._took_pass(event)
        if delta.num_tokens and self.timings.first_token_seconds is None:
            self.timings.first_token_seconds = self.elapsed_seconds
            self._metrics.first_token.observe(self.elapsed_seconds)
        self._emit(delta)
        is_complete = answer.is_block_complete()
        if answer.finish_reason is None and not is_complete:
            if event.completion != "nothing":
                raise BlockLost(f"pass {event.step} is said to complete what is not complete")
            return None
        self.timings.num_blocks += 1
        self._metrics.blocks.inc()
        self._metrics.steps_per_block.observe(answer.step)
        self._metrics.decode.observe(self._block_decode_seconds)
        self._block_decode_seconds = 0.0
        self.num_failures_in_row = 0
        self.avoid.clear()
        if answer.finish_reason is None:
            return Event.BLOCK_COMPLETE
        is_last = self.request.block + 1 == self.request.geometry.num_blocks
        return Event.BLOCK_COMPLETE if is_complete and is_last else Event.ANSWER_COMPLETE

    def _took_pass(self, event: PassRan) -> None:
        timings, block = self.timings, self.request.block
        timings.num_steps += 1
        if len(timings.commit_counts) <= block:
            timings.commit_counts.append([])
        timings.commit_counts[block].append(len(event.commits))
        timings.decode_seconds += event.decode_seconds
        self._block_decode_seconds += event.decode_seconds
        self._queued(event.queue_seconds, is_decode=True)
        self._metrics.steps.inc()
        self._metrics.tokens_per_step.observe(len(event.commits))

    def _queued(self, seconds: float, *, is_decode: bool = False) -> None:
        self.timings.queueing_seconds += seconds
        if is_decode:
            self.timings.decode_queueing_seconds += seconds
        else:
            self.timings.prefill_queueing_seconds += seconds

    def failed_at(self, place: Place, reason: str) -> None:
        """A place did not work out: lost, or refused with ``reason``."""
        self.num_failures_in_row += 1
        self.timings.num_retries += 1
        self.avoid.add(place.epoch)
        self._metrics.retries.labels(reason).inc()

    @property
    def elapsed_seconds(self) -> float:
        """Since the driver took the request."""
        return self._clock() - self._started
