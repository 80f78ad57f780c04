"""Drives requests: one coroutine each, block by block, from the first place to the last token.

Gets a place, starts the block there, follows it, moves it on to a decode worker, starts it again
where it was lost. Within a block the steps follow each other as the lifecycle's table has them: a
worker that reports one out of turn loses its block. Whether another place is wanted or the answer
is over, the table's command tells. Decides retries and back-off. It does not choose workers
(``places``), keep the books (``run``) nor speak HTTP to clients (public API).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import structlog

from sangam_core.errors import BlockLost, DeadlineExceeded, SangamError, Unavailable
from sangam_core.lifecycle import Command, Event, Phase
from sangam_core.placement import Role
from sangam_core.wire import (
    BlockStart,
    Completed,
    KVArrived,
    KVSent,
    Lost,
    PassRan,
    Prefilled,
    Refusal,
)
from sangam_router.job import Answer, Emit, Job
from sangam_router.ledger.tasks import raise_if_cancelled
from sangam_router.metrics import RouterMetrics
from sangam_router.places import Place, Places
from sangam_router.run import Run
from sangam_router.text_stream import Decode
from sangam_router.worker_client import BlockStream, WorkerClient

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DriverLimits:
    """The settings that bound a request's life (see ``RouterSettings``)."""

    request_seconds: float
    max_lost: int
    backoff_seconds: float
    max_backoff_seconds: float
    settle_seconds: float


class Driver:
    """Drives any number of requests at once.

    Args:
        mask_id: the model's mask token. decode: ids to text.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        places: Places,
        workers: WorkerClient,
        mask_id: int,
        decode: Decode,
        limits: DriverLimits,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = places
        self._workers = workers
        self._mask_id = mask_id
        self._decode = decode
        self._limits = limits
        self._metrics = metrics
        self._clock = clock

    async def run(self, job: Job, emit: Emit) -> Answer:
        """Generate an answer. Cancelling it frees everything that it holds.

        Raises:
            Overloaded, Unavailable, InvalidRequest: it was not let in, or cannot go on.
            DeadlineExceeded: its time was over.
        """
        run = Run(
            job,
            emit,
            mask_id=self._mask_id,
            decode=self._decode,
            metrics=self._metrics,
            clock=self._clock,
            deadline=self._clock() + self._limits.request_seconds,
        )
        outcome = "bug"
        self._metrics.in_flight.inc()
        try:
            try:
                async with asyncio.timeout(self._limits.request_seconds):
                    answer = await self._drive(run)
            except TimeoutError:
                seconds = self._limits.request_seconds
                raise DeadlineExceeded(f"the answer took longer than {seconds:g} s") from None
            outcome = answer.finish_reason
            return answer
        except asyncio.CancelledError:
            run.end(Event.CANCEL)
            outcome = "cancelled"
            raise
        except SangamError as error:
            run.end(Event.GIVE_UP)
            outcome = type(error).__name__
            raise
        finally:
            self._finished(run, outcome)

    def _finished(self, run: Run, outcome: str) -> None:
        timings = run.timings
        timings.latency_seconds = run.elapsed_seconds
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(outcome).inc()
        if run.request.phase is Phase.FINISHED:
            self._metrics.end_to_end.observe(timings.latency_seconds)
            self._metrics.prompt_tokens.inc(len(run.job.prompt_ids))
            self._metrics.completion_tokens.inc(run.answer.num_tokens)
        _log.info(
            "answer",
            answer_id=run.job.request_id,
            outcome=outcome,
            num_prompt_tokens=len(run.job.prompt_ids),
            num_tokens=run.answer.num_tokens,
            num_blocks=timings.num_blocks,
            num_steps=timings.num_steps,
            num_retries=timings.num_retries,
            latency_seconds=round(timings.latency_seconds, 4),
        )

    async def _drive(self, run: Run) -> Answer:
        command = Command.PLACE_PREFILL
        while command is Command.PLACE_PREFILL:
            event = await self._attempt(run)
            command = run.advance(event)
            if event is Event.BLOCK_LOST and run.request.num_lost > self._limits.max_lost:
                raise Unavailable(f"gave up after {run.request.num_lost} lost blocks")
            if event in (Event.BLOCK_LOST, Event.PLACE_REFUSED):
                await self._back_off(run)
            elif command is Command.PLACE_PREFILL:
                run.answer.next_block(run.request.block)
        assert command is Command.FINISH, command
        reason = run.answer.finish_reason
        assert reason is not None, "the mask buffer holds max_tokens"
        return Answer(reason, run.answer.num_tokens, run.timings)

    async def _back_off(self, run: Run) -> None:
        exponent = min(run.num_failures_in_row - 1, 30)
        seconds = self._limits.backoff_seconds * 2**exponent
        await asyncio.sleep(min(seconds, self._limits.max_backoff_seconds))

    # -- one attempt at a block -------------------------------------------------------------

    async def _attempt(self, run: Run) -> Event:
        """Place the current block and follow it to its end, or to its loss."""
        asked = self._clock()
        with self._metrics.waiting.track_inprogress():
            place = await self._places.prefill(
                run.request, run.demand, run.avoid, is_new=run.is_new
            )
        run.placed(place, self._clock() - asked, "prefill")
        run.advance(Event.PREFILL_PLACED)
        async with self._holding(place):
            try:
                opened = await self._open(place, run.prefill_start(place))
                if isinstance(opened, Refusal):
                    self._refused(run, place, opened)
                    return Event.PLACE_REFUSED
                async with self._open_while_there(place, opened) as stream:
                    return await self._follow_prefill(run, place, stream)
            except BlockLost as lost:
                raise_if_cancelled()
                self._lost(run, place, lost)
                return Event.BLOCK_LOST

    async def _follow_prefill(self, run: Run, place: Place, stream: BlockStream) -> Event:
        hands_over = place.role is Role.PREFILL
        while True:
            match await stream.next_event():
                case Prefilled() as event:
                    run.prefilled(event)
                    await self._places.release_load(place)
                    if not hands_over:
                        run.reported(Event.PREFILLED_IN_PLACE)
                    elif run.answer.step > 0:  # a repeated prefill, whose commits do not count
                        return await self._hand_over(run, place, stream)
                case PassRan() as event:
                    end = run.passed(event)
                    if end is not None:
                        await self._see_off(event, stream)
                        return end
                    if hands_over:
                        return await self._hand_over(run, place, stream)
                case Lost() as event:
                    raise BlockLost(event.reason.message)
                case Completed() | KVSent():
                    raise BlockLost("the worker ended the block before it was complete")
                case _:
                    pass

    async def _see_off(self, event: PassRan, stream: BlockStream) -> None:
        """Read the last line where the worker knows that the block is complete.

        Otherwise (a stop string, ``max_tokens`` within a block) closing the stream cancels it.
        """
        if event.completion == "nothing":
            return
        try:
            async with asyncio.timeout(self._limits.settle_seconds):
                while not isinstance(await stream.next_event(), Completed):
                    pass
        except (BlockLost, TimeoutError):
            raise_if_cancelled()  # else: all tokens are here, which is what counts

    # -- disaggregated ----------------------------------------------------------------------

    async def _hand_over(self, run: Run, sender: Place, stream: BlockStream) -> Event:
        """The block is prefilled on a prefill worker: decode it elsewhere.

        The sender's stream stays open until the KV has moved (closing it would drop the KV), and
        is watched meanwhile.
        """
        run.advance(Event.PREFILLED_FOR_TRANSFER)
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch_sender(run, sender, stream))
                event = await self._decode_elsewhere(run, sender)
                # The KV has moved. The sender says so only between two of its iterations, and the
                # next block need not wait for one.
                watch.cancel()
        except BaseExceptionGroup as group:
            # Not `except*`: before Python 3.11.4 it wraps what is raised in it into a group again.
            errors, bugs = group.split(SangamError)
            if errors is None or bugs is not None:
                raise
            raise_if_cancelled()
            raise _first(errors) from None
        return event

    async def _watch_sender(self, run: Run, sender: Place, stream: BlockStream) -> None:
        """Follow the sender until the KV has left it; its loss before that loses the block."""
        try:
            while not isinstance(event := await stream.next_event(), KVSent):
                if isinstance(event, Lost):
                    raise BlockLost(event.reason.message)
        except BlockLost as lost:
            if run.request.phase is not Phase.DECODING:
                raise BlockLost(f"{sender.worker_id}, which held the KV: {lost}") from None
        await self._places.release(sender)

    async def _decode_elsewhere(self, run: Run, sender: Place) -> Event:
        demand = replace(run.demand, kv_format=sender.kv_format)
        while True:
            asked = self._clock()
            place = await self._places.decode(run.request, demand, run.avoid)
            run.placed(place, self._clock() - asked, "decode")
            run.advance(Event.DECODE_PLACED)
            async with self._holding(place):
                try:
                    opened = await self._open(place, run.decode_start(place, sender))
                    if not isinstance(opened, Refusal):
                        async with self._open_while_there(place, opened) as stream:
                            return await self._follow_decode(run, stream)
                except BlockLost:
                    run.avoid.add(place.epoch)
                    raise
                self._refused(run, place, opened)
                run.advance(Event.PLACE_REFUSED)
            await self._back_off(run)

    async def _follow_decode(self, run: Run, stream: BlockStream) -> Event:
        while True:
            match await stream.next_event():
                case KVArrived() as event:
                    run.reported(Event.KV_ARRIVED)
                    run.kv_arrived(event)
                case PassRan() as event:
                    end = run.passed(event)
                    if end is not None:
                        await self._see_off(event, stream)
                        return end
                case Lost() as event:
                    raise BlockLost(event.reason.message)
                case Completed() | KVSent():
                    raise BlockLost("the worker ended the block before it was complete")
                case _:
                    pass

    # -- places that did not work out ---------------------------------------------------------

    @asynccontextmanager
    async def _holding(self, place: Place) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self._places.release(place)

    async def _open(self, place: Place, start: BlockStart) -> BlockStream | Refusal:
        """Start a block; one that stands still takes connections and answers nobody."""
        lost = self._places.lost(place)

        async def give_up_when_lost() -> None:
            await lost.wait()
            until_lost.reschedule(0)

        try:
            async with asyncio.timeout(None) as until_lost:
                watch = asyncio.create_task(give_up_when_lost())
                try:
                    return await self._workers.open(place.url, start)
                finally:
                    # Not awaited: a stream that is open by now must not be lost to the time limit.
                    watch.cancel()
        except TimeoutError:
            raise BlockLost(f"the lease of {place.worker_id} was gone before it answered") from None

    @asynccontextmanager
    async def _open_while_there(
        self, place: Place, stream: BlockStream
    ) -> AsyncIterator[BlockStream]:
        """A stream that breaks when the worker's lease is gone: a dead machine says nothing."""
        lost = self._places.lost(place)

        async def break_when_lost() -> None:
            await lost.wait()
            stream.abort(f"the lease of {place.worker_id} is gone")

        watch = asyncio.create_task(break_when_lost())
        try:
            async with stream:
                yield stream
        finally:
            watch.cancel()
            await asyncio.wait({watch})

    def _refused(self, run: Run, place: Place, refusal: Refusal) -> None:
        run.failed_at(place, refusal.code)
        _log.info(
            "refused",
            answer_id=run.job.request_id,
            block=run.request.block,
            worker_id=place.worker_id,
            code=refusal.code,
            reason=refusal.message,
        )

    def _lost(self, run: Run, place: Place, lost: BlockLost) -> None:
        run.failed_at(place, "lost")
        _log.warning(
            "block_lost",
            answer_id=run.job.request_id,
            block=run.request.block,
            step=run.answer.step,
            worker_id=place.worker_id,
            reason=str(lost),
        )


def _first(errors: BaseExceptionGroup[SangamError]) -> SangamError:
    """The one error of a group that counts: the most final one."""
    flat: list[SangamError] = []
    pending: list[BaseException] = [errors]
    while pending:
        error = pending.pop()
        if isinstance(error, BaseExceptionGroup):
            pending += error.exceptions
        elif isinstance(error, SangamError):
            flat.append(error)
    return min(flat, key=lambda error: isinstance(error, BlockLost))
