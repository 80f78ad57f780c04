"""Runs the Lua scripts by their digest, and sorts Redis's errors into ours.

Decides how a script reaches Redis (EVALSHA, loaded on first use) and which errors mean that Redis
cannot be used now. Whether to try again is ``session``'s decision.
"""

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from typing import Any, NoReturn

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from sangam_core.errors import SangamError

Client = Redis | RedisCluster
"""Any client with ``decode_responses=True``; ``connect`` makes one."""

_BATCH = 64
"""Calls in one pipeline: bounds how long the first waits for the last."""

_MAX_IN_FLIGHT = 32
"""Single calls on their way at the same time, and so connections, where there are no pipelines."""

_PASSING = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ClusterError,
    exceptions.RedisClusterException,
    OSError,
)
"""Redis is away, or starting."""

_UNFIT = re.compile(
    r"\b(READONLY|MISCONF|OOM|NOREPLICAS|LOADING|BUSY|NOPERM|NOAUTH|WRONGPASS"
    r"|CLUSTERDOWN|MASTERDOWN|TRYAGAIN)\b"
)
"""Error codes of a server that is failing over, full or misconfigured: not bugs of the scripts.
They come as text around the code, or as exceptions that have swallowed the code."""

_UNFIT_ERRORS = (
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.NoPermissionError,
    exceptions.MasterDownError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.NoScriptError,  # again, behind loading it: two servers answer, as in a fail-over
)


class Script(StrEnum):
    """One operation each; the file of that name in ``lua/``."""

    REGISTER = "register"
    RENEW = "renew"
    SNAPSHOT = "snapshot"
    RESERVE_PREFILL = "reserve_prefill"
    RESERVE_DECODE = "reserve_decode"
    RELEASE = "release"
    JOIN = "join"
    LEAVE = "leave"
    RESTORE = "restore"
    LEASE = "lease"
    AUDIT = "audit"
    DESIRE = "desire"


class Unreachable(SangamError):
    """The call failed and may or may not have been carried out (internal to the ledger)."""


class UnknownRouter(SangamError):
    """Redis holds no lease under this fence: it expired, or the data is gone (internal)."""


def source(script: Script) -> str:
    """The Lua text of a script, with what all share in front."""
    folder = resources.files(__package__) / "lua"
    parts = ["common", script.value]
    if script in (Script.RESERVE_PREFILL, Script.RESERVE_DECODE):
        parts.insert(1, "admission")
    return "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in parts)


class ScriptRunner:
    """The scripts, on the keys of one prefix.

    Calls made while others are on their way travel together, in order, in the next pipeline: one
    connection, and a fraction of the work a call costs by itself. A cluster client takes no
    EVALSHA in pipelines; there each call goes alone.
    """

    def __init__(self, redis: Client, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix
        self._sources = {script: source(script) for script in Script}
        self._digests = {
            script: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
            for script, text in self._sources.items()
        }
        self._queue: deque[_Call] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)

    async def run(self, script: Script, arguments: Sequence[str | int]) -> Any:
        """Run a script once and return its reply.

        Raises:
            Unreachable: Redis did not answer, or not with a usable state.
            UnknownRouter: the script asks for a registration first.
        """
        try:
            reply = await self._send(self._command(script, arguments))
            if isinstance(reply, exceptions.NoScriptError):
                await self._redis.script_load(self._sources[script])
                reply = await self._send(self._command(script, arguments))
        except _PASSING as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        if isinstance(reply, exceptions.RedisError):
            await self._raise(reply)
        return reply

    # -- internals ------------------------------------------------------------------------

    async def _raise(self, error: exceptions.RedisError) -> NoReturn:
        """Raise our error for an error reply; what is none of Redis's states is a bug: as it is."""
        text = str(error)
        if "UNKNOWN_ROUTER" in text:
            raise UnknownRouter(text)
        if isinstance(error, (*_PASSING, *_UNFIT_ERRORS)) or _UNFIT.search(text):
            if isinstance(self._redis, Redis):
                # After a fail-over the address may name another server; a connection stays with
                # the old one. A cluster client finds out by itself.
                await self._redis.connection_pool.disconnect(inuse_connections=False)
            raise Unreachable(f"{type(error).__name__}: {text}") from error
        raise error

    def _command(self, script: Script, arguments: Sequence[str | int]) -> tuple[str | int, ...]:
        return ("EVALSHA", self._digests[script], 1, self._prefix, *arguments)

    async def _send(self, command: tuple[str | int, ...]) -> Any:
        """The reply of a command; an error reply is returned."""
        if isinstance(self._redis, RedisCluster):
            async with self._slots:
                try:
                    return await self._redis.execute_command(*command)
                except exceptions.ResponseError as error:
                    return error
        call = _Call(command, asyncio.get_running_loop().create_future())
        self._queue.append(call)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_queue(self._redis), name="ledger sender")
        return await call.reply

    async def _send_queue(self, redis: Redis) -> None:
        batch: list[_Call] = []
        try:
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
                await _send_batch(redis, batch)
        finally:
            self._sender = None
            for call in (*batch, *self._queue):  # only where this task was cancelled
                call.reply.cancel()
            self._queue.clear()


@dataclass(frozen=True, slots=True)
class _Call:
    command: tuple[str | int, ...]
    reply: "asyncio.Future[Any]"


async def _send_batch(redis: Redis, batch: Sequence[_Call]) -> None:
    """Send a pipeline and hand out its replies; what breaks it is every call's error."""
    pipeline = redis.pipeline(transaction=False)
    for call in batch:
        pipeline.execute_command(*call.command)
    try:
        replies = await pipeline.execute(raise_on_error=False)
    except Exception as error:  # noqa: BLE001 - whoever asked decides
        replies = [None] * len(batch)
        for call in batch:
            if not call.reply.done():
                call.reply.set_exception(error)
    for call, reply in zip(batch, replies, strict=True):
        if not call.reply.done():
            call.reply.set_result(reply)
