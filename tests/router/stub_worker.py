"""A worker without a model: speaks the internal API over real sockets and says what it is told.

Its passes commit fixed positions, from left to right with holes, so that what it says depends
neither on restarts nor on the placement, as the real worker's float32 results do not.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from sangam_core.answer import Completion, completion
from sangam_core.decoding import Commit, EosRule
from sangam_core.placement import Role
from sangam_core.wire import (
    BLOCK_EVENT,
    TOKEN_HEADER,
    BlockEvent,
    BlockKey,
    BlockStart,
    Completed,
    KVArrived,
    KVSent,
    LossReason,
    Lost,
    PassRan,
    Prefilled,
    Queued,
    Refusal,
)

TOKEN = "secret"
EOS, MASK = 257, 261
COMMITS_PER_PASS = 8


class ConnectionBreaks(Exception):
    """Raised by a hook: the worker dies, as far as its streams are concerned."""


class BlockIsLost(Exception):
    """Raised by a hook: the worker gives the block up."""


def say(text: str) -> Callable[[BlockStart], list[int]]:
    """An answer: the bytes of a text, then end tokens for the rest of the mask buffer."""

    def answer(start: BlockStart) -> list[int]:
        length = start.geometry.geometry().mask_buffer_tokens
        ids = list(text.encode())[:length]
        return ids + [EOS] * (length - len(ids))

    return answer


async def _no_hook(start: BlockStart, step: int) -> None:
    return None


class FirstBlockHeld:
    """A ``before_pass`` that holds up every request's first block.

    Attributes:
        reached: a pass is about to run. go_on: lets them run.
    """

    def __init__(self) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, start: BlockStart, step: int) -> None:
        self.reached.set()
        if start.key.block == 0:
            await self.go_on.wait()


@dataclass
class StubWorker:
    """One worker. Use as an ``async with``.

    Attributes:
        answer: what the whole mask buffer becomes.
        before_pass: awaited before each pass that counts; holds it up, or raises.
        peers: workers by id, from which KV is fetched.
        refusals: codes of the next refusals.
        starts: every block start that came. running: keys under way. dropped: keys whose reader
            went away.
    """

    worker_id: str = "w"
    role: Role = Role.COLOCATED
    epoch: str = "e1"
    answer: Callable[[BlockStart], Sequence[int]] = field(default_factory=lambda: say("hello"))
    before_pass: Callable[[BlockStart, int], Awaitable[None]] = _no_hook
    before_kv_sent: Callable[[BlockKey], Awaitable[None]] | None = None
    before_kv_arrived: Callable[[BlockKey], Awaitable[None]] | None = None
    peers: "dict[str, StubWorker]" = field(default_factory=dict)
    refusals: deque[Any] = field(default_factory=deque)
    starts: list[BlockStart] = field(default_factory=list)
    running: set[BlockKey] = field(default_factory=set)
    dropped: list[BlockKey] = field(default_factory=list)
    url: str = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/internal/v1/blocks", self._start)
        self._changed = asyncio.Condition()
        self._kv_taken: dict[BlockKey, asyncio.Event] = {}
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Answer nothing any more. May be repeated."""
        await self._runner.cleanup()

    def restart(self) -> None:
        """Come back with another epoch, as after a crash."""
        self.epoch += "'"

    async def until_idle(self) -> None:
        """Wait until no block is here."""
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: not self.running)

    # -- HTTP ---------------------------------------------------------------------------------

    async def _start(self, request: web.Request) -> web.StreamResponse:
        assert request.headers[TOKEN_HEADER] == TOKEN
        start = BlockStart.model_validate_json(await request.read())
        self.starts.append(start)
        if self.refusals:
            return _refuse(self.refusals.popleft())
        if start.worker_epoch != self.epoch:
            return _refuse("wrong_epoch")
        if start.key in self.running:
            return _refuse("duplicate")
        response = web.StreamResponse()
        self.running.add(start.key)
        try:
            await response.prepare(request)
            async for event in self._events(start):
                await response.write(BLOCK_EVENT.dump_json(event) + b"\n")
            await response.write_eof()
        except ConnectionBreaks:
            assert request.transport is not None
            request.transport.abort()
        except ConnectionError:
            self.dropped.append(start.key)
        except asyncio.CancelledError:
            self.dropped.append(start.key)
            raise
        finally:
            self.running.discard(start.key)
            async with self._changed:
                self._changed.notify_all()
        return response

    # -- what it says ---------------------------------------------------------------------------

    async def _events(self, start: BlockStart) -> AsyncIterator[BlockEvent]:
        try:
            async for event in self._run(start):
                yield event
        except BlockIsLost as lost:
            yield Lost(reason=LossReason(code="engine_error", message=str(lost)))

    async def _run(self, start: BlockStart) -> AsyncIterator[BlockEvent]:
        yield Queued()
        ids, step, has_moved = list(start.ids), 0, start.source is not None
        if start.resume is not None and start.resume.step:
            step = start.resume.step
            for commit in start.resume.commits:
                ids[commit.position] = commit.token
        if start.source is None:
            yield Prefilled(queue_seconds=0.001, prefill_seconds=0.002)
        else:
            await self.peers[start.source.worker_id].take_kv(start.key, start.source.epoch)
            if self.before_kv_arrived is not None:
                await self.before_kv_arrived(start.key)
            yield KVArrived(transfer_seconds=0.003, num_bytes=1000)
        if start.hands_over and step:
            yield await self._hold_kv(start.key)
            return
        while True:
            await self.before_pass(start, step)
            commits = self._commits(start, ids, step)
            for commit in commits:
                ids[commit.position] = commit.token
            done = _completion(start, ids)
            yield PassRan(
                step=step,
                commits=commits,
                carry=step / 10,
                completion=done,
                queue_seconds=0.005 if has_moved else 0.0,
                decode_seconds=0.004 if step else 0.0,
            )
            step, has_moved = step + 1, False
            if done is not Completion.NOTHING:
                yield Completed(num_passes=step)
                return
            if start.hands_over:
                yield await self._hold_kv(start.key)
                return

    def _commits(self, start: BlockStart, ids: list[int], step: int) -> tuple[Commit, ...]:
        geometry = start.geometry.geometry()
        block = geometry.block_range(start.key.block)
        order = sorted(range(len(block)), key=lambda i: (i + 10 * (i % 3), i))
        now = sorted(
            block.start + i for i in order[step * COMMITS_PER_PASS : (step + 1) * COMMITS_PER_PASS]
        )
        answer = self.answer(start)
        assert all(ids[position] == MASK for position in now)
        return tuple(
            Commit(position=p, token=answer[p - geometry.prompt_tokens], confidence=0.95)
            for p in now
        )

    # -- KV ---------------------------------------------------------------------------------

    async def _hold_kv(self, key: BlockKey) -> BlockEvent:
        taken = self._kv_taken.setdefault(key, asyncio.Event())
        try:
            await taken.wait()
        finally:
            del self._kv_taken[key]
        if self.before_kv_sent is not None:
            await self.before_kv_sent(key)
        return KVSent()

    async def take_kv(self, key: BlockKey, epoch: str) -> None:
        """Fetch a block's KV from here, as a decode worker does."""
        if epoch != self.epoch or key not in self.running:
            raise BlockIsLost("the sender does not hold the block")
        self._kv_taken.setdefault(key, asyncio.Event()).set()


def _refuse(code: Any) -> web.Response:
    body = Refusal(code=code, message=f"refused: {code}").model_dump_json()
    return web.Response(status=409, text=body, content_type="application/json")


def _completion(start: BlockStart, ids: list[int]) -> Completion:
    block = start.geometry.geometry().block_range(start.key.block)
    ends = start.decoding.eos_rule is EosRule.END
    return completion(ids, block, MASK, start.decoding.eos_ids if ends else ())
