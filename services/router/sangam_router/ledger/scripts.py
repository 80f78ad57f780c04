"""Runs the Lua scripts by their digest, and sorts Redis's errors into ours.

Decides how a script reaches Redis (EVALSHA, loaded on first use) and which errors mean that Redis
cannot be used now. Whether to try again is ``session``'s decision.
"""

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from importlib import resources
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from sangam_core.errors import SangamError

Client = Redis | RedisCluster
"""Any client with ``decode_responses=True``; ``connect`` makes one."""

_MAX_IN_FLIGHT = 32
"""Scripts on their way at the same time, and so connections; Redis runs one at a time anyway."""

_PASSING = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.NoPermissionError,
    exceptions.ClusterError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.TryAgainError,
    exceptions.RedisClusterException,
    OSError,
)
"""Redis is away, starting, failing over or misconfigured: not a bug of the scripts."""


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
    OWN_RECORDS = "own_records"
    LEASE = "lease"
    AUDIT = "audit"


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
    """The scripts, registered with a client, on the keys of one prefix."""

    def __init__(self, redis: Client, prefix: str) -> None:
        self._keys = [prefix]
        self._scripts = {script: redis.register_script(source(script)) for script in Script}
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)

    async def run(self, script: Script, arguments: Sequence[str | int]) -> Any:
        """Run a script once and return its reply.

        Raises:
            Unreachable: Redis did not answer, or not with a usable state.
            UnknownRouter: the script asks for a registration first.
        """
        try:
            async with self._slots:
                return await self._scripts[script](keys=self._keys, args=arguments)
        except _PASSING as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        except exceptions.ResponseError as error:
            if "UNKNOWN_ROUTER" in str(error):
                raise UnknownRouter(str(error)) from None
            raise
