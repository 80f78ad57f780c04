"""The worker's lease in Redis: written anew with every heartbeat, gone when the worker is.

Also where the ledger's wish for another role, or a drain, is seen. Decides when to announce and
how to bear Redis being away: the worker keeps serving, tries again, and says so once per change.
What is in the lease is ``process``'s decision.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog
from pydantic import SecretStr
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from sangam_core.errors import ConfigurationError
from sangam_core.lease import DesiredState, LedgerKeys, WorkerLease
from sangam_core.redis_url import client_settings
from sangam_worker.metrics import WorkerMetrics

Client = Redis | RedisCluster

_FIRST_BACKOFF_SECONDS = 0.1

_RENEW = """
local was_known = redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('SADD', KEYS[2], ARGV[2])
return {was_known, redis.call('HGET', KEYS[3], 'role'), redis.call('HGET', KEYS[3], 'is_drained')}
"""
"""Lease (KEYS[1], written anew so that another version's fields do not linger), set of workers,
desired state; expiry in milliseconds, worker id, fields and values. A script, since redis-py's
transactions on a cluster block the event loop.
"""

_WITHDRAW = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
return 1
"""
"""Lease, set of workers; worker id, epoch. A lease of another epoch is a successor's, started
under the same id while this one was leaving: it stays.
"""

_NOT_YET = "not registered yet"
"""The trouble of a worker that has not tried."""

_UNFIT = "the worker is not fit to serve"

log = structlog.get_logger(__name__)


def connect(
    url: str, *, is_cluster: bool, timeout_seconds: float, password: SecretStr | None = None
) -> Client:
    """A client that never waits longer than told and never repeats a command by itself.

    Args:
        password: wins over one in the URL.

    Raises:
        ConfigurationError: the URL cannot be used.
    """
    url, settings = client_settings(url, password, timeout_seconds)
    try:
        if is_cluster:
            # One more try follows a fail-over; a lease may be written twice.
            return RedisCluster.from_url(url, retry=Retry(NoBackoff(), 1), **settings)
        return Redis.from_url(url, retry=Retry(NoBackoff(), 0), **settings)
    except (ValueError, TypeError, exceptions.RedisError) as error:
        raise ConfigurationError(f"SANGAM_REDIS_URL: {error}") from None


class Presence:
    """Keeps one worker's lease.

    Args:
        lease: the lease as it should read now.
        is_fit: whether the worker should be known at all (a dead GPU thread should not).
        on_desired: called with what the ledger asks for, at each heartbeat.
    """

    def __init__(
        self,
        redis: Client,
        keys: LedgerKeys,
        *,
        lease: Callable[[], WorkerLease],
        is_fit: Callable[[], bool],
        on_desired: Callable[[DesiredState], None],
        metrics: WorkerMetrics,
        heartbeat_seconds: float,
        lease_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._lease = lease
        self._is_fit = is_fit
        self._on_desired = on_desired
        self._metrics = metrics
        self._heartbeat_seconds = heartbeat_seconds
        self._lease_seconds = lease_seconds
        self._timeout_seconds = timeout_seconds
        self._has_changed = asyncio.Event()
        self._announced: tuple[object, ...] | None = None
        self._held_until = 0.0
        self._trouble: str | None = _NOT_YET
        self._fault = ""
        self._task: asyncio.Task[None] | None = None
        self._is_ended = False

    def start(self) -> None:
        """Begin to renew the lease."""
        self._task = asyncio.create_task(self._run(), name="presence")

    def nudge(self) -> None:
        """Something that routers must know has changed: renew now."""
        self._has_changed.set()

    @property
    def trouble(self) -> str | None:
        """Why the lease is not held; ``None`` while it is."""
        if time.monotonic() < self._held_until:
            return None
        return f"no lease in Redis: {self._trouble or 'the last renewal has lapsed'}"

    async def withdraw(self) -> None:
        """Stop renewing and take the lease away; a Redis that is away lets it lapse."""
        await self._stop_renewing()
        worker_id = self._lease().worker_id
        try:
            async with asyncio.timeout(self._timeout_seconds):
                keys = self._keys.worker(worker_id), self._keys.workers
                removal: Any = self._redis.eval(
                    _WITHDRAW, len(keys), *keys, worker_id, self._lease().epoch
                )
                await removal
                await self._redis.publish(self._keys.wake_channel, worker_id)
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            log.warning("lease left to lapse", error=_text(error))
        self._held_until = 0.0
        self._trouble = "withdrawn"
        self._metrics.lease_is(is_held=False)

    async def close(self) -> None:
        """Stop renewing and end the connections; a lease that is held lapses."""
        await self._stop_renewing()
        await self._redis.aclose()

    async def _stop_renewing(self) -> None:
        if self._task is not None:
            # redis-py may swallow a cancellation in the middle of a call.
            self._is_ended = True
            self._has_changed.set()
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def _run(self) -> None:
        backoff_seconds = _FIRST_BACKOFF_SECONDS
        while not self._is_ended:
            self._has_changed.clear()
            if not self._is_fit():
                self._failed(_UNFIT)
                pause_seconds = self._heartbeat_seconds
            elif await self._beat_or_tell():
                pause_seconds, backoff_seconds = self._heartbeat_seconds, _FIRST_BACKOFF_SECONDS
            else:
                pause_seconds = min(backoff_seconds, self._heartbeat_seconds)
                backoff_seconds *= 2
            await self._pause(pause_seconds)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._has_changed.wait()
        except TimeoutError:
            pass

    async def _beat_or_tell(self) -> bool:
        """A fault of ours must not end the heartbeat, or the worker would be lost in silence."""
        try:
            return await self._beat()
        except Exception as error:
            if self._fault != (fault := _text(error)):
                log.exception("a fault while the lease is renewed")
            self._fault = fault
            self._failed(f"a fault of the worker's: {fault}")
            return False

    async def _beat(self) -> bool:
        """Renew once; False when Redis did not take it."""
        lease = self._lease()
        began = time.monotonic()
        news = (lease.role, lease.epoch, lease.is_draining)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                desired, was_known = await self._renew(lease)
                if news != self._announced or not was_known:
                    await self._redis.publish(self._keys.wake_channel, lease.worker_id)
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            self._failed(_text(error))
            return False
        self._announced = news
        # Counted from before the call: Redis cannot have taken it earlier.
        self._held_until = began + self._lease_seconds
        if self._trouble is not None:
            log.info("lease held", worker_id=lease.worker_id, role=lease.role, epoch=lease.epoch)
            self._trouble = None
        self._metrics.heartbeat(is_held=True)
        self._metrics.lease_is(is_held=True)
        self._on_desired(desired)
        return True

    async def _renew(self, lease: WorkerLease) -> tuple[DesiredState, bool]:
        """Write the lease in one step; the desired state, and whether a lease was there."""
        keys = (
            self._keys.worker(lease.worker_id),
            self._keys.workers,
            self._keys.desired(lease.worker_id),
        )
        words = (word for field in lease.fields().items() for word in field)
        lease_milliseconds = str(int(self._lease_seconds * 1000))
        answer: Any = self._redis.eval(
            _RENEW, len(keys), *keys, lease_milliseconds, lease.worker_id, *words
        )
        was_known, role, is_drained = await answer
        fields = {"role": role, "is_drained": is_drained}
        return DesiredState.from_fields(fields), bool(was_known)

    def _failed(self, trouble: str) -> None:
        if self._trouble is None:
            log.warning("lease not renewed; serving goes on", error=trouble)
        elif self._trouble is _NOT_YET and trouble is not _UNFIT:
            log.warning(
                "no lease yet: Redis cannot be used, and routers do not know this worker; "
                "is SANGAM_REDIS_URL right?",
                error=trouble,
            )
        self._trouble = trouble
        self._metrics.heartbeat(is_held=False)
        self._metrics.lease_is(is_held=self.trouble is None)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
