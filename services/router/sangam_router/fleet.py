"""What this router knows of the workers between two blocks: readiness, limits, and who was lost.

Fed by every snapshot of the ledger, and by its own slow refresh. Decides when a worker counts as
lost and what requests the fleet can hold; placement is the core's. The API asks it before it
accepts a request, drivers follow ``lost`` while a block runs.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from sangam_core.errors import Unavailable
from sangam_core.lease import WorkerLease
from sangam_core.placement import (
    Demand,
    FleetLoad,
    PlacementPolicy,
    Role,
    WorkerLoad,
    can_ever_hold,
    longest_tokens,
    of_role,
    prefillers,
)
from sangam_router.ledger import FleetSnapshot
from sangam_router.ledger.tasks import raise_if_cancelled

_ANY_BLOCK = Demand("any", cost_tokens=1, num_pages=1)
"""As small as can be."""


class SnapshotSource(Protocol):
    """What the fleet view needs of the ledger."""

    @property
    def answering_since_seconds(self) -> float | None:
        """Since when Redis answers and has kept its data; None while it is away."""
        ...

    def observe(self, observer: Callable[[FleetSnapshot], None]) -> None:
        """Have every snapshot shown to ``observer``."""
        ...

    async def snapshot(self) -> FleetSnapshot:
        """Take a snapshot. Raises ``Unavailable``."""
        ...


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """What the workers of now can take at most.

    Attributes:
        max_sequence_tokens: prompt + L of a block that finds a worker that takes the length and has
            the pages, for its prefill and for its decode.
        max_tokens_without_kv: the same for a request without KV (cache ``none``); 0 where no
            worker takes those.
    """

    max_sequence_tokens: int
    max_tokens_without_kv: int


class FleetView:
    """The workers of this router's service, as of the last snapshot.

    Args:
        policy: Algorithm 2's parameters; they decide which workers may prefill.
        worker_lease_seconds: how long the workers' leases live. After Redis was away, or has
            lost its data, a lease may be missing for so long while the worker is well.
        clock: the ledger's clock.
    """

    def __init__(
        self,
        ledger: SnapshotSource,
        *,
        policy: PlacementPolicy,
        worker_lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._policy = policy
        self._grace_seconds = worker_lease_seconds
        self._clock = clock
        self._snapshot: FleetSnapshot | None = None
        self._missing: dict[str, WorkerLoad] = {}
        self._watched: dict[tuple[str, str], asyncio.Event] = {}
        self._changed = asyncio.Event()
        ledger.observe(self.see)

    # -- what is known --------------------------------------------------------------------

    @property
    def snapshot(self) -> FleetSnapshot | None:
        """The last snapshot; None before the first."""
        return self._snapshot

    @property
    def leases(self) -> Mapping[str, WorkerLease]:
        """Leases by worker id, as of the last snapshot."""
        return self._snapshot.leases if self._snapshot else {}

    def problem(self) -> str | None:
        """Why no request can be served now, in words for people; None when they can."""
        if self._snapshot is None:
            return "the fleet has not been seen yet: Redis has not answered"
        active = _active(self._snapshot.fleet)
        if not active:
            lacking = "worker"
        elif not any(worker.role.can_decode for worker in active):
            lacking = "decode-capable worker"
        elif not self._prefillers(active):
            lacking = "worker that takes prefills"
        elif not any(prefillers(self._snapshot.fleet, _ANY_BLOCK, self._policy)):
            lacking = f"worker that decodes the prefill workers' KV ({self._kv_formats()})"
        else:
            return None
        return f"no {lacking} is ready{self._incompatible_note()}"

    def remark(self) -> str | None:
        """What people should know although requests are served; None when there is nothing.

        Workers that differ in quantization are used alike: their KV has one format, and prefills
        gain more from FP8 than decodes lose by it.
        """
        leases = self.leases.values()
        remarks = []
        if told := _told_if_mixed(lease.quantization for lease in leases):
            remarks.append(
                f"workers differ in SANGAM_QUANTIZATION ({told}): "
                "an answer may depend on where its blocks run"
            )
        if told := self._kv_formats():
            remarks.append(f"blocks are handed over only between workers of the same KV: {told}")
        return "; ".join(remarks) or None

    @property
    def is_ready(self) -> bool:
        """Whether some worker prefills and some worker decodes."""
        return self.problem() is None

    def limits(self) -> FleetLimits | None:
        """What fits into the fleet now; None while nobody could serve."""
        fleet = self._standing_fleet()
        active = _active(fleet)
        if not any(worker.role.can_decode for worker in active) or not self._prefillers(active):
            return None
        has_colocated = bool(of_role(fleet.workers, Role.COLOCATED))
        without_kv = longest_tokens(fleet, self._policy, keeps_kv=False) if has_colocated else 0
        return FleetLimits(
            max_sequence_tokens=int(longest_tokens(fleet, self._policy)),
            max_tokens_without_kv=int(without_kv),
        )

    @property
    def has_colocated(self) -> bool:
        """Whether a request without KV (cache ``none``) has anywhere to run."""
        return any(worker.role is Role.COLOCATED for worker in _active(self._standing_fleet()))

    def can_ever_hold(self, demand: Demand) -> bool:
        """Whether a block fits the workers at all (``placement.can_ever_hold``)."""
        return can_ever_hold(self._standing_fleet(), demand, self._policy)

    def longest_tokens(self, demand: Demand) -> float:
        """The longest sequence that the workers take of a request that runs as this one does."""
        keeps_kv = not demand.needs_colocated
        return longest_tokens(self._standing_fleet(), self._policy, keeps_kv=keeps_kv)

    # -- losses ---------------------------------------------------------------------------

    def lost(self, worker_id: str, epoch: str) -> asyncio.Event:
        """An event that is set once the worker is known to be gone or to have another epoch.

        A driver waits for it beside the worker's event stream: a machine that vanished says
        nothing on TCP. The event of a worker that is lost already is set with the next snapshot.
        """
        return self._watched.setdefault((worker_id, epoch), asyncio.Event())

    async def wait_for_change(self, timeout_seconds: float) -> None:
        """Wait until a worker comes, goes, drains or changes its role, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()

    def see(self, snapshot: FleetSnapshot) -> None:
        """Take in a snapshot; an older one than the last is dropped."""
        if self._snapshot and snapshot.taken_at_seconds < self._snapshot.taken_at_seconds:
            return
        before, standing = self._members(), self._standing_fleet()
        self._snapshot = snapshot
        present = {*snapshot.leases, *(misfit.worker_id for misfit in snapshot.incompatible)}
        self._missing = {
            worker.worker_id: worker
            for worker in standing.workers
            if worker.worker_id not in present and not self._is_lost(worker.worker_id, worker.epoch)
        }
        if self._members() != before:
            self._changed.set()
            self._changed = asyncio.Event()
        for worker_id, epoch in [*self._watched]:
            if self._is_lost(worker_id, epoch):
                self._watched.pop((worker_id, epoch)).set()

    async def run(self, refresh_seconds: float) -> None:
        """Look at the fleet every ``refresh_seconds``, until cancelled."""
        while True:
            with contextlib.suppress(Unavailable):
                await self._ledger.snapshot()
            raise_if_cancelled()
            await asyncio.sleep(refresh_seconds)

    # -- internals ------------------------------------------------------------------------

    def _members(self) -> frozenset[tuple[str, str, bool]]:
        return frozenset((w.worker_id, w.epoch, w.is_draining) for w in self._fleet().workers)

    def _fleet(self) -> FleetLoad:
        return self._snapshot.fleet if self._snapshot else FleetLoad(())

    def _standing_fleet(self) -> FleetLoad:
        """The fleet with those that are missing from a Redis that came back empty, but not lost.

        What the fleet can ever take does not change because leases return one after the other.
        """
        fleet = self._fleet()
        if not self._missing:
            return fleet
        return replace(fleet, workers=(*fleet.workers, *self._missing.values()))

    def _prefillers(self, active: list[WorkerLoad]) -> list[WorkerLoad]:
        """Workers that ``place_prefill`` may choose."""
        dedicated = [worker for worker in active if worker.role is Role.PREFILL]
        if dedicated and not self._policy.is_overflow_allowed:
            return dedicated
        return [worker for worker in active if worker.role.can_prefill]

    def _is_lost(self, worker_id: str, epoch: str) -> bool:
        lease = self.leases.get(worker_id)
        if lease is not None:
            return lease.epoch != epoch
        since = self._ledger.answering_since_seconds
        return since is not None and self._clock() - since > self._grace_seconds

    def _kv_formats(self) -> str:
        """How many workers have which KV; empty where all have the same."""
        told = _told_if_mixed(each.kv_format for each in self.leases.values() if each.kv_format)
        return told and f"SANGAM_DTYPE, SANGAM_KV_TRANSPORT: {told}"

    def _incompatible_note(self) -> str:
        others = self._snapshot.incompatible if self._snapshot else ()
        if not others:
            return ""
        reasons = "; ".join(sorted({each.reason for each in others}))
        return f" ({len(others)} cannot be used: {reasons})"


def _active(fleet: FleetLoad) -> list[WorkerLoad]:
    return [worker for worker in fleet.workers if not worker.is_draining]


def _told_if_mixed(values: Iterable[str]) -> str:
    """How many have which value; empty where all have the same."""
    counts = Counter(values)
    if len(counts) < 2:
        return ""
    return ", ".join(f"{count} with {name!r}" for name, count in sorted(counts.items()))
