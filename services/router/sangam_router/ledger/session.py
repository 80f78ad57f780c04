"""This router's standing with Redis: its lease, its fence, retries, and what follows a loss.

Decides when a call is repeated and when the router registers again. What it then restores is the
ledger's business (``on_lease_lost``).

Every call carries the **fence**, a random word that the router's lease holds. After a call whose
fate is unknown the fence changes, so that the call, should it still sit in some buffer, is not
carried out behind our back once we have cleaned up after it. Registering again is also the answer
to a lease that expired and to a Redis that came back empty: all three are one path.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from sangam_core.errors import Unavailable
from sangam_router.ledger.records import check_id
from sangam_router.ledger.scripts import Script, ScriptRunner, UnknownRouter, Unreachable

_log = structlog.get_logger(__name__)

_NUM_TRIES = 3
_FIRST_BACKOFF_SECONDS = 0.05


class Session:
    """Fenced calls on behalf of one router process.

    Args:
        on_lease_lost: called after registering where Redis held no lease of this process: its
            records and line entries were reaped, or lost with all data. Calls wait for it.

    Attributes:
        owner: names this process in Redis: the router id and a random part, since a restarted
            router must not inherit what its predecessor held.
        answering_since_seconds: since when (on the clock) Redis has answered every call and kept
            its data; None while it does not answer. Soon after it workers' leases may be missing
            without anything being wrong with the workers.
    """

    def __init__(
        self,
        runner: ScriptRunner,
        *,
        router_id: str,
        service: str,
        lease_seconds: float,
        clock: Callable[[], float],
        on_lease_lost: Callable[[], Awaitable[None]],
    ) -> None:
        self.owner = f"{check_id(router_id, 'router_id')}.{secrets.token_hex(4)}"
        self.service = check_id(service, "service")
        self.answering_since_seconds: float | None = None
        self._is_trouble_told = False
        self._runner = runner
        self._lease_ms = round(lease_seconds * 1000)
        self._clock = clock
        self._on_lease_lost = on_lease_lost
        self._fence = secrets.token_hex(8)
        self._registered_fence: str | None = None
        self._registration: asyncio.Task[None] | None = None
        self._generation: str | None = None

    async def call(self, script: Script, *arguments: str | int) -> Any:
        """Run a fenced script; registers first where needed, retries a few times.

        Raises:
            Unavailable: Redis did not answer in any of the tries.
        """
        failure: Exception | None = None
        for attempt in range(_NUM_TRIES):
            if isinstance(failure, Unreachable):
                await asyncio.sleep(_FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
            fence = self._fence
            try:
                if self._registered_fence != fence:
                    await self.register()
                    fence = self._fence
                return await self.call_once(script, self.owner, fence, *arguments)
            except UnknownRouter as error:
                failure = error
                self._forget(fence)
            except Unreachable as error:
                failure = error
                self._change_fence(fence)
        raise Unavailable("Redis cannot be used now") from failure

    async def renew(self) -> Any:
        """The heartbeat's call (the reply of ``renew.lua``)."""
        return await self.call(Script.RENEW, self._lease_ms, self.service)

    async def call_once(self, script: Script, *arguments: str | int) -> Any:
        """Run a script as it is: no fence, no retry. Raises what ``ScriptRunner.run`` does."""
        try:
            reply = await self._runner.run(script, arguments)
        except Unreachable as error:
            if not self._is_trouble_told:
                _log.warning("redis cannot be used", error=str(error))
            self._is_trouble_told, self.answering_since_seconds = True, None
            raise
        if self.answering_since_seconds is None:
            if self._is_trouble_told:
                _log.info("redis answers again")
            self._is_trouble_told, self.answering_since_seconds = False, self._clock()
        return reply

    async def call_fenced_once(self, script: Script, *arguments: str | int) -> Any:
        """A fenced call for use in ``on_lease_lost``: no retry, no registration."""
        return await self.call_once(script, self.owner, self._fence, *arguments)

    async def register(self) -> None:
        """Take a lease under the current fence. Concurrent callers share one attempt and its fate.

        Raises:
            Unreachable: Redis did not answer.
        """
        if self._registered_fence == self._fence:
            return
        if self._registration is None:
            self._registration = asyncio.create_task(self._register(), name="ledger register")
            self._registration.add_done_callback(self._registration_done)
        # One caller's cancellation must not take the registration from the others.
        await asyncio.shield(self._registration)

    async def aclose(self) -> None:
        """Wait for a registration under way."""
        if self._registration is not None:
            await asyncio.gather(self._registration, return_exceptions=True)

    # -- internals ------------------------------------------------------------------------

    async def _register(self) -> None:
        fence = self._fence
        had_lease, generation = await self.call_once(
            Script.REGISTER, self.owner, fence, self._lease_ms, self.service
        )
        if self._generation not in (None, generation):
            _log.warning("redis has lost its data; putting back what this router holds")
            self.answering_since_seconds = self._clock()
        self._generation = generation
        if not had_lease:
            await self._on_lease_lost()
        self._registered_fence = fence

    def _registration_done(self, task: asyncio.Task[None]) -> None:
        self._registration = None
        if not task.cancelled():
            task.exception()  # every caller may be gone: then nobody else looks at it

    def _forget(self, fence: str) -> None:
        if self._registered_fence == fence:
            self._registered_fence = None

    def _change_fence(self, fence: str) -> None:
        if self._fence == fence:
            self._fence = secrets.token_hex(8)
