"""Blocks as the event loop sees them: who may come in, whose stream gets which event.

Between the HTTP API and the GPU thread. Decides refusals and cancellation; knows neither HTTP
nor tensors. Everything here runs on the event loop but ``publish``.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from sangam_core.errors import SangamError, Unavailable
from sangam_core.rules import Family, check_decoding
from sangam_core.wire import (
    BlockKey,
    BlockStart,
    HeldBlocks,
    KVSource,
    LossReason,
    Queued,
    Refusal,
)
from sangam_worker.block_state import BlockState, block_state_from
from sangam_worker.loop import EngineLoop
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.reporting import Notice
from sangam_worker.standing import Standing
from sangam_worker.streams import BlockStream, is_last

_ANSWER_SECONDS = 10.0
"""Longest wait for the GPU thread's answer to a question; an iteration may be under way."""


class BlockRefused(SangamError):
    """A block was not taken, and nothing is held for it (409)."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class ModelFacts(Protocol):
    """What the service knows of the model."""

    @property
    def family(self) -> Family:
        """Decides which rules of decoding it supports."""
        ...

    @property
    def mask_id(self) -> int:
        """The mask token."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def max_sequence_tokens(self) -> int:
        """Limit on prompt + L: the model's, or a shorter one that the worker was given."""
        ...


class FetchesKV(Protocol):
    """Brings a prefilled block's KV here."""

    def fetch(self, key: BlockKey, source: KVSource, pages: tuple[int, ...]) -> None:
        """Start fetching into reserved pages; the loop learns the end by ``transfer_ended``."""
        ...

    def give_up(self, key: BlockKey) -> None:
        """Nobody wants the block any more; a transfer that moves bytes may still end."""
        ...


class BlockService:
    """The blocks on this worker.

    Args:
        total_pages: the KV pool.
    """

    def __init__(
        self,
        *,
        standing: Standing,
        model: ModelFacts,
        total_pages: int,
        metrics: WorkerMetrics,
    ) -> None:
        self._standing = standing
        self._model = model
        self._total_pages = total_pages
        self._metrics = metrics
        self._aio = asyncio.get_running_loop()
        self._loop: EngineLoop
        self._fetcher: FetchesKV
        self._streams: dict[BlockKey, BlockStream] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def attach(self, loop: EngineLoop, fetcher: FetchesKV) -> None:
        """Name the GPU thread and the transfers; both report back here."""
        self._loop = loop
        self._fetcher = fetcher

    @property
    def num_blocks(self) -> int:
        """Blocks that have not ended here."""
        return len(self._streams)

    async def start_block(self, start: BlockStart) -> BlockStream:
        """Take a block.

        Raises:
            BlockRefused: with nothing held for it.
            InvalidRequest: naming the field.
        """
        refusal = self._standing.refusal_of(start) or self._sickness()
        if refusal is not None:
            raise self._refused(refusal.code, refusal.message)
        state = self._state_of(start)
        key = start.key
        if key in self._streams:
            raise self._refused("duplicate", f"block {key} is running here")
        if state.num_pages > self._total_pages:
            raise self._refused(
                "never_fits",
                f"the block needs {state.num_pages} pages, the pool has {self._total_pages}",
            )
        stream = BlockStream(key)
        self._streams[key] = stream
        self._is_empty.clear()
        if start.source is None:
            stream.push(Queued())
            self._loop.submit(state, start.deadline_seconds)
        else:
            await self._reserve(state, start.source, start.deadline_seconds, stream)
        return stream

    def abandon(self, key: BlockKey) -> None:
        """Whoever read the block's stream is gone: cancel it."""
        stream = self._streams.get(key)
        if stream is not None and not stream.is_abandoned:
            stream.abandon()
            self._metrics.stream_abandoned()
            self._cancel(key, "the stream was closed")

    async def remove(self, key: BlockKey, wait_seconds: float) -> bool:
        """Cancel or release a block; False while a transfer still keeps it."""
        stream = self._streams.get(key)
        if stream is None:
            return True
        self._cancel(key, "the block was deleted")
        try:
            await asyncio.wait_for(stream.ended.wait(), wait_seconds)
        except TimeoutError:
            return False
        return True

    async def held(self) -> HeldBlocks:
        """What is here. ``Unavailable`` when the GPU thread does not answer."""
        future = asyncio.wrap_future(self._loop.held())
        try:
            blocks = await asyncio.wait_for(future, _ANSWER_SECONDS)
        except TimeoutError:
            raise Unavailable("the GPU thread is busy with a long iteration") from None
        return HeldBlocks(
            worker_id=self._standing.worker_id,
            epoch=self._standing.epoch,
            role=self._standing.role,
            is_draining=self._standing.is_draining,
            total_pages=self._total_pages,
            free_pages=self._loop.status.free_pages,
            blocks=blocks,
        )

    async def emptied(self, timeout_seconds: float) -> bool:
        """Wait until no block is here; False when the time is over first."""
        try:
            await asyncio.wait_for(self._is_empty.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True

    async def ping_quiet_streams(self, ping_seconds: float) -> None:
        """Keep quiet streams audible, for ever."""
        while True:
            await asyncio.sleep(ping_seconds / 4)
            for stream in self._streams.values():
                stream.ping(ping_seconds)

    def publish(self, batch: Sequence[Notice]) -> None:
        """Take an iteration's events (called on the GPU thread)."""
        if not self._aio.is_closed():
            self._aio.call_soon_threadsafe(self._deliver, batch)

    # -- internals ------------------------------------------------------------------------

    def _deliver(self, batch: Sequence[Notice]) -> None:
        for key, event in batch:
            stream = self._streams[key]
            stream.push(event)
            if is_last(event):
                self._forget(key)

    def _forget(self, key: BlockKey) -> None:
        del self._streams[key]
        if not self._streams:
            self._is_empty.set()

    async def _reserve(
        self, state: BlockState, source: KVSource, deadline_seconds: float, stream: BlockStream
    ) -> None:
        """Reserve pages, then fetch the KV into them."""
        answer = asyncio.wrap_future(self._loop.reserve(state, deadline_seconds))
        try:
            pages = await asyncio.shield(answer)
        except asyncio.CancelledError:
            stream.abandon()
            answer.add_done_callback(lambda done: self._undo(state.key, done.result()))
            raise
        if pages is None:
            self._forget(state.key)
            raise self._refused("no_pages", f"{state.num_pages} pages are needed, fewer are free")
        stream.push(Queued())
        self._fetcher.fetch(state.key, source, pages)

    def _undo(self, key: BlockKey, pages: tuple[int, ...] | None) -> None:
        """Give back a reservation that nobody waited for."""
        if pages is None:
            self._forget(key)
        else:
            self._loop.transfer_ended(key, _cancelled("the request was cancelled"))

    def _cancel(self, key: BlockKey, message: str) -> None:
        self._loop.remove(key, _cancelled(message))
        self._fetcher.give_up(key)

    def _state_of(self, start: BlockStart) -> BlockState:
        state = block_state_from(start, self._model.mask_id, self._model.vocab_size)
        total_tokens = state.geometry.total_tokens
        if total_tokens > self._model.max_sequence_tokens:
            # Not the request's fault: workers may differ, and another may take it.
            raise self._refused(
                "never_fits",
                f"the block's sequence has {total_tokens} tokens, this worker takes "
                f"{self._model.max_sequence_tokens}",
            )
        check_decoding(self._model.family, state.decoding)
        return state

    def _sickness(self) -> Refusal | None:
        ailment = self._loop.ailment()
        return None if ailment is None else Refusal(code="draining", message=ailment)

    def _refused(self, code: str, message: str) -> BlockRefused:
        self._metrics.refused(code)
        return BlockRefused(Refusal.model_validate({"code": code, "message": message}))


def _cancelled(message: str) -> LossReason:
    return LossReason(code="cancelled", message=message)
