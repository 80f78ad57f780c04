"""Draining, role switches and leaving: how a worker stops taking blocks and lets them finish.

Orders come from operators (API), from the ledger (a desired role or drain, seen at heartbeats)
and from SIGTERM. Prefills that have not run are handed back at once; running decodes and held KV
finish, up to a deadline; then they are lost here and start again elsewhere.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from sangam_core.errors import SangamError
from sangam_core.lease import DesiredState
from sangam_core.placement import Role
from sangam_core.wire import LossReason
from sangam_worker.loop import EngineLoop
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.service import BlockService
from sangam_worker.standing import Closure, Standing

log = structlog.get_logger(__name__)

_DROP_SECONDS = 5.0
"""How long dropped blocks may take to be gone before they are dropped again (or given up)."""


class RoleConflict(SangamError):
    """An operator orders a role while the ledger asks for another (409)."""


class RoleControl:
    """Carries out drains and role switches.

    Args:
        tau_tokens: the token budget under a role.
        close_pairs: ends every pair communicator (they are keyed by the epoch).
    """

    def __init__(
        self,
        *,
        standing: Standing,
        service: BlockService,
        loop: EngineLoop,
        metrics: WorkerMetrics,
        tau_tokens: Callable[[Role], int],
        close_pairs: Callable[[], Awaitable[None]],
        drain_deadline_seconds: float,
    ) -> None:
        self._standing = standing
        self._service = service
        self._loop = loop
        self._metrics = metrics
        self._tau_tokens = tau_tokens
        self._close_pairs = close_pairs
        self._drain_deadline_seconds = drain_deadline_seconds
        self._target = standing.role
        self._desired: Role | None = None
        self._unknown_desire: str | None = None
        self._switching: asyncio.Task[None] | None = None
        self._leave_by: float | None = None

    def drain(self) -> None:
        """Take no new blocks until ``undrain``; waiting prefills are handed back."""
        self._standing.close(Closure.OPERATOR)
        self._loop.hand_back_waiting(_lost("draining", self._standing))

    def undrain(self) -> None:
        """Take new blocks again."""
        self._standing.reopen(Closure.OPERATOR)

    def order_role(self, role: Role) -> None:
        """Switch to a role. ``RoleConflict`` when the ledger asks for another one."""
        if self._desired not in (None, role):
            raise RoleConflict(
                f"the ledger asks for {self._desired}; change or remove the desired role there"
            )
        self._switch_to(role)

    def desire(self, desired: DesiredState) -> None:
        """Take in what the ledger asks for; what it does not name is kept."""
        if desired.is_drained is True:
            if Closure.DESIRED not in self._standing.closures:
                self._standing.close(Closure.DESIRED)
                self._loop.hand_back_waiting(_lost("draining", self._standing))
        elif desired.is_drained is False:
            self._standing.reopen(Closure.DESIRED)
        self._desire_role(desired.role)

    def _desire_role(self, text: str | None) -> None:
        """``None`` keeps the role, an unknown one is refused."""
        if text is None:
            self._desired = self._unknown_desire = None
        elif text in set(Role):
            self._desired, self._unknown_desire = Role(text), None
            self._switch_to(self._desired)
        elif text != self._unknown_desire:
            self._desired, self._unknown_desire = None, text
            self._metrics.unknown_role_desired()
            log.warning("unknown desired role ignored", role=text, known=[*Role])

    def begin_to_leave(self) -> None:
        """Take no new blocks ever again; those that wait are handed back, the others finish."""
        if self._leave_by is None:
            # Counted once: the hook before SIGTERM and SIGTERM itself share the deadline, or the
            # pod's grace period would have to hold it twice.
            self._leave_by = asyncio.get_running_loop().time() + self._drain_deadline_seconds
        self._standing.close(Closure.LEAVING)
        if self._switching is not None:
            self._switching.cancel()
        self._loop.hand_back_waiting(_lost("draining", self._standing))

    async def leave(self) -> None:
        """Let the blocks here finish, within the deadline, and take no new ones."""
        self.begin_to_leave()
        reason = _lost("draining", self._standing)
        assert self._leave_by is not None
        left_seconds = max(0.0, self._leave_by - asyncio.get_running_loop().time())
        if not await self._service.emptied(left_seconds):
            await self._drop_all(reason)
            await self._service.emptied(_DROP_SECONDS)

    async def _drop_all(self, reason: LossReason) -> None:
        """Time is over for the blocks here, and for the transfers that pin some of them."""
        self._loop.drop_all(reason)
        await self._close_pairs()

    def remarks(self) -> list[str]:
        """What an operator should know."""
        if self._unknown_desire is None:
            return []
        return [f"desired role {self._unknown_desire!r} is unknown and was ignored"]

    def report(self) -> dict[str, object]:
        """The standing as it is now."""
        standing = self._standing
        return {
            "worker_id": standing.worker_id,
            "epoch": standing.epoch,
            "role": standing.role,
            "target_role": self._target,
            "is_draining": standing.is_draining,
            "reasons": standing.closures,
            "num_blocks": self._service.num_blocks,
            "remarks": self.remarks(),
        }

    def _switch_to(self, role: Role) -> None:
        is_under_way = self._switching is not None and not self._switching.done()
        is_moot = role is self._standing.role and not is_under_way
        if is_moot or Closure.LEAVING in self._standing.closures:
            return
        self._target = role
        if not is_under_way:
            self._switching = asyncio.create_task(self._switch(), name="role switch")

    async def _switch(self) -> None:
        """Drain, flip, open. A later order while draining only changes the target."""
        standing = self._standing
        log.info("role switch begins", role=standing.role, target=self._target)
        standing.close(Closure.ROLE_SWITCH)
        reason = _lost("role_changed", standing)
        self._loop.hand_back_waiting(reason)
        is_empty = await self._service.emptied(self._drain_deadline_seconds)
        while not is_empty:
            await self._drop_all(reason)
            is_empty = await self._service.emptied(_DROP_SECONDS)
        await self._close_pairs()
        self._loop.set_tau(self._tau_tokens(self._target))
        standing.switch(self._target)
        log.info("role switched", role=standing.role, epoch=standing.epoch)


def _lost(code: str, standing: Standing) -> LossReason:
    message = f"{standing.worker_id} is {', '.join(standing.closures)}"
    return LossReason.model_validate({"code": code, "message": message})
