"""Who this worker is to the fleet: role, epoch, and whether it takes new blocks.

The one place that changes them; the service asks it whether a block may come in, the presence
publishes it. Draining and switching roles as processes are ``drain``'s.
"""

import secrets
from collections.abc import Callable
from enum import StrEnum

from sangam_core.placement import Role
from sangam_core.wire import BlockStart, Refusal
from sangam_worker.metrics import WorkerMetrics


class Closure(StrEnum):
    """Why no new block is taken."""

    OPERATOR = "drained by an operator"
    DESIRED = "drained by the ledger's wish"
    ROLE_SWITCH = "switching its role"
    LEAVING = "shutting down"


class Standing:
    """A worker's identity and admission.

    Attributes:
        worker_id: unique over the fleet. url: base of its internal API.
        boot_role: the role it started with. role: the one in force.
        epoch: random; new with every start and role switch, so that placements made for an
            earlier life are refused.
    """

    def __init__(
        self, *, worker_id: str, url: str, model: str, role: Role, metrics: WorkerMetrics
    ) -> None:
        self.worker_id = worker_id
        self.url = url
        self.model = model
        self.boot_role = role
        self.role = role
        self.epoch = _new_epoch()
        self._metrics = metrics
        self._closures: set[Closure] = set()
        self._listeners: list[Callable[[], None]] = []
        self._changed()

    @property
    def is_draining(self) -> bool:
        """Whether new blocks are refused."""
        return bool(self._closures)

    @property
    def closures(self) -> tuple[Closure, ...]:
        """Why new blocks are refused."""
        return tuple(sorted(self._closures))

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called after every change."""
        self._listeners.append(listener)

    def close(self, closure: Closure) -> None:
        """Refuse new blocks from now on."""
        if closure not in self._closures:
            self._closures.add(closure)
            self._changed()

    def reopen(self, closure: Closure) -> None:
        """Take back one reason for refusing."""
        if closure in self._closures:
            self._closures.remove(closure)
            self._changed()

    def switch(self, role: Role) -> None:
        """Take a new role under a new epoch, and open. No block may be here."""
        self.role = role
        self.epoch = _new_epoch()
        self._closures.discard(Closure.ROLE_SWITCH)
        self._metrics.role_switched()
        self._changed()

    def refusal_of(self, start: BlockStart) -> Refusal | None:
        """Why a block may not come in, as far as identity and admission go."""
        if self.is_draining:
            return Refusal(
                code="draining", message=f"{self.worker_id} is {', '.join(self.closures)}"
            )
        if start.worker_epoch != self.epoch:
            return Refusal(
                code="wrong_epoch",
                message=f"{self.worker_id} has epoch {self.epoch}, not {start.worker_epoch}",
            )
        if not self._admits(start):
            kind = "decode" if start.source else "hand over" if start.hands_over else "run in place"
            return Refusal(
                code="wrong_role", message=f"{self.worker_id} is {self.role}: it cannot {kind}"
            )
        return None

    def _admits(self, start: BlockStart) -> bool:
        if start.source is not None:
            return self.role.can_decode
        return self.role is Role.COLOCATED or (self.role is Role.PREFILL and start.hands_over)

    def _changed(self) -> None:
        self._metrics.standing_is(self.role, is_draining=self.is_draining)
        for listener in self._listeners:
            listener()


def _new_epoch() -> str:
    return secrets.token_hex(8)
