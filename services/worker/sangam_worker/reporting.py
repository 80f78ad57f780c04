"""Tells what happened to blocks: wire events to their readers, counts to the metrics.

The GPU thread's books note what happened in as few steps as they can, since the device may be
waiting; made into events here it is while the device works on the next iteration. Decides nothing.
Called by ``loop``, on the GPU thread; the order of what it is given is kept.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from sangam_core.answer import Completion
from sangam_core.wire import BlockEvent, BlockKey, Completed, KVSent, Lost, PassRan, Prefilled
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.scheduler import Progress

Notice = tuple[BlockKey, BlockEvent]
"""One event of one block."""

Publish = Callable[[Sequence[Notice]], None]
"""Called on the GPU thread with everything that an iteration brought, in order."""


class Ran(NamedTuple):
    """A pass that has run: what it did, and the block's times around it.

    Attributes:
        waited_seconds: since the block came, or since its pass before. ran_seconds: its iteration.
        reserve_seconds: how long a block whose prefill ran elsewhere waited for its pages;
            ``None`` for others.
        num_passes: of the block on this worker, this one included.
    """

    progress: Progress
    waited_seconds: float
    ran_seconds: float
    reserve_seconds: float | None
    num_passes: int


class Reporter:
    """Makes events and counts of what happened.

    Args:
        publish: takes each batch of events.
    """

    def __init__(self, publish: Publish, metrics: WorkerMetrics) -> None:
        self._publish = publish
        self._metrics = metrics

    def tell(self, happened: Iterable[Ran | Notice]) -> None:
        """Publish everything as one batch; nothing when nothing happened."""
        batch: list[Notice] = []
        for each in happened:
            if isinstance(each, Ran):
                self._add_pass(batch, each)
            else:
                batch.append(each)
        for _, event in batch:
            self._count(event)
        if batch:
            self._publish(batch)

    def _add_pass(self, batch: list[Notice], ran: Ran) -> None:
        progress, waited, took = ran.progress, ran.waited_seconds, ran.ran_seconds
        key = progress.key
        queued = decoded = 0.0
        if not progress.is_first_here:
            decoded = waited + took
        elif ran.reserve_seconds is not None:
            queued, decoded = ran.reserve_seconds + waited, took
        else:
            event = Prefilled.model_construct(queue_seconds=waited, prefill_seconds=took)
            batch.append((key, event))
        if progress.counts:
            passed = PassRan.model_construct(
                step=progress.step,
                commits=progress.commits,
                carry=progress.carry,
                completion=progress.completion,
                queue_seconds=queued,
                decode_seconds=decoded,
            )
            batch.append((key, passed))
        if progress.completion is not Completion.NOTHING:
            batch.append((key, Completed.model_construct(num_passes=ran.num_passes)))

    def _count(self, event: BlockEvent) -> None:
        if isinstance(event, Prefilled):
            self._metrics.prefilled(event.queue_seconds, event.prefill_seconds)
        elif isinstance(event, Completed):
            self._metrics.block_left("completed")
        elif isinstance(event, KVSent):
            self._metrics.block_left("kv_sent")
        elif isinstance(event, Lost):
            self._metrics.block_left(event.reason.code)
