"""What operators want of workers, as written into Redis: role, and whether it is drained.

The script (``lua/desire.lua``) decides, so that any number of routers that see the same pods in
different orders agree: an older wish never overwrites a newer one, and the last worker that
decodes is neither made a prefill worker nor drained. While leases return to a Redis that has lost
its data, which worker is the last cannot be told, and nothing is decided. Called by
``fleet_watch``.
"""

from dataclasses import dataclass
from enum import StrEnum

from sangam_core.errors import Unavailable
from sangam_core.lease import LedgerKeys
from sangam_core.placement import Role
from sangam_router.ledger.scripts import Client, Script, ScriptRunner, Unreachable

_EXPIRY_SECONDS = 24 * 3600
"""Wishes are written again at every resync; those of pods that are gone fade."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What an operator wants of one worker.

    Attributes:
        worker_id: the pod's UID. name: the pod's, for people.
        version: the pod's resourceVersion, a decimal number.
        role: as written, known or not. boot_role: what the worker starts as.
        objection: why it cannot be granted, as far as that can be told from the wish alone.
    """

    worker_id: str
    name: str
    version: str
    boot_role: Role
    role: str
    is_drained: bool
    objection: str = ""


class Verdict(StrEnum):
    """What became of a wish."""

    APPLIED = "applied"
    KEPT = "kept"
    """It stood already."""
    STALE = "stale"
    """A newer one is known."""
    REFUSED = "refused"
    UNSURE = "unsure"
    """Nothing was written: it looks like the last worker that decodes, and others may return."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict; of a refusal, the reason (a word: ``unknown_role``, ``last_decode_worker``)."""

    verdict: Verdict
    reason: str = ""


class Desires:
    """Writes wishes under one namespace.

    Args:
        settle_seconds: within these, workers that live have their leases back after Redis lost
            its data.
    """

    def __init__(self, redis: Client, keys: LedgerKeys, *, settle_seconds: float) -> None:
        self._settle_seconds = settle_seconds
        self._runner = ScriptRunner(redis, keys.prefix)

    async def write(self, wish: Wish) -> Decision:
        """Write a wish if it is newer and can be granted.

        Raises:
            Unavailable: Redis does not answer.
        """
        arguments = (
            wish.worker_id,
            wish.role,
            int(wish.is_drained),
            wish.version,
            wish.boot_role.value,
            wish.objection,
            _EXPIRY_SECONDS * 1000,
            repr(self._settle_seconds),
        )
        try:
            verdict, reason = await self._runner.run(Script.DESIRE, arguments)
        except Unreachable as error:
            raise Unavailable(f"Redis does not answer: {error}") from error
        return Decision(Verdict(verdict), reason)
