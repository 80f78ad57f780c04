"""The books of the GPU thread: the blocks here, and what becomes of them between two passes.

Decides deadlines, pins, and what an outcome or a failed iteration means for each block; who may
run is the scheduler's decision. Knows no thread and no engine: ``loop`` calls it, and whoever does
holds the inbox's lock. What happened is noted in order; ``reporting`` makes events of it later.
"""

from collections.abc import Callable

from sangam_core.answer import Completion
from sangam_core.wire import BlockEvent, BlockKey, HeldBlock, KVArrived, KVSent, LossReason, Lost
from sangam_worker.block_state import Stage
from sangam_worker.plan import Outcome, PassOutcome, Plan
from sangam_worker.reporting import Notice, Ran
from sangam_worker.scheduler import Scheduler
from sangam_worker.tracking import Expiries, LoopStatus, Moved, TrackedBlock


class Books:
    """The scheduler's blocks, with their times, pins and deadlines.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self._clock = clock
        self._tracked: dict[BlockKey, TrackedBlock] = {}
        self._expiries = Expiries()
        self._happened: list[Ran | Notice] = []

    # -- what an iteration did ----------------------------------------------------------------

    def take_in(self, outcome: Outcome, started: float, ended: float) -> int:
        """Note what an iteration did (seconds by the clock); the tokens that it committed."""
        committed_tokens = 0
        took, happened = ended - started, self._happened
        for progress in self.scheduler.apply(outcome):
            key = progress.key
            tracked = self._tracked[key]
            committed_tokens += len(progress.commits)
            happened.append(
                Ran(
                    progress,
                    started - tracked.since_seconds,
                    took,
                    tracked.reserve_seconds if tracked.is_transferred else None,
                    tracked.state.num_passes_here,
                )
            )
            tracked.since_seconds = ended
            if progress.completion is not Completion.NOTHING:
                del self._tracked[key]
        for item in outcome.passes:
            if item.error is not None:
                self._lost_in_engine(item.key, item.error)
        return committed_tokens

    def iteration_failed(self, plan: Plan, message: str) -> None:
        """Lose the blocks of a failed iteration; nothing else knows what the engine left."""
        failed = (PassOutcome(item.key, (), error=message) for item in plan.passes)
        self.scheduler.apply(Outcome(plan.iteration, tuple(failed)))
        for item in plan.passes:
            self._lost_in_engine(item.key, message)

    def take_happened(self) -> list[Ran | Notice]:
        """What has happened since this was last asked, in order."""
        happened, self._happened = self._happened, []
        return happened

    def lost_by_end(self, reason: LossReason) -> list[Ran | Notice]:
        """The same, and every block lost: the thread has ended by a bug."""
        keys = tuple(self._tracked)  # another thread may be reserving
        return [*self.take_happened(), *((key, Lost(reason=reason)) for key in keys)]

    def status(self) -> LoopStatus:
        """As heartbeats and probes see it."""
        scheduler = self.scheduler
        return LoopStatus(
            free_pages=scheduler.pages.num_free,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_blocks=len(self._tracked),
            carried_tokens=scheduler.carried_tokens,
        )

    # -- blocks that come ----------------------------------------------------------------------

    def submit(self, tracked: TrackedBlock) -> None:
        """Queue a block's prefill."""
        self.scheduler.submit(tracked.state)
        self._keep(tracked)

    def reserve(self, tracked: TrackedBlock) -> tuple[int, ...] | None:
        """Pin pages for KV that will arrive; ``None`` without room."""
        if not self.scheduler.reserve(tracked.state):
            return None
        tracked.is_pinned, tracked.reserve_seconds = True, self._clock() - tracked.since_seconds
        self._keep(tracked)
        return tracked.state.pages

    # -- transfers -----------------------------------------------------------------------------

    def pin(self, key: BlockKey) -> tuple[int, ...] | None:
        """Pin a held block's pages for sending; ``None`` when it is not held or pinned already."""
        tracked = self._tracked.get(key)
        if tracked is None or tracked.is_pinned or tracked.state.stage is not Stage.HOLDING:
            return None
        tracked.is_pinned = True
        return tracked.state.pages

    def unpin(self, key: BlockKey) -> bool:
        """Unpin, and drop the block if it was doomed meanwhile; whether it is still here."""
        if (tracked := self._tracked.get(key)) is None:
            return False
        tracked.is_pinned = False
        if tracked.doom is not None:
            self.lose(key, tracked.doom)
            return False
        return True

    def transfer_ended(self, key: BlockKey, result: Moved | LossReason, at_seconds: float) -> None:
        """Unpin a block whose transfer has ended, and let go of it or let it decode."""
        if not self.unpin(key):
            return
        tracked = self._tracked[key]
        if isinstance(result, LossReason):
            self.lose(key, result)
        elif tracked.state.stage is Stage.HOLDING:
            self.scheduler.remove(key)
            self._gone(key, KVSent())
        else:
            self.scheduler.arrived(key)
            tracked.since_seconds = at_seconds
            arrived = KVArrived(transfer_seconds=result.seconds, num_bytes=result.num_bytes)
            self._happened.append((key, arrived))

    # -- blocks that go, and the rest ----------------------------------------------------------

    def lose(self, key: BlockKey, reason: LossReason) -> None:
        """Drop a block, when its transfer has ended if there is one. Unknown ones are none."""
        if (tracked := self._tracked.get(key)) is None:
            return
        if tracked.is_pinned:
            tracked.doom = tracked.doom or reason
            return
        self.scheduler.remove(key)
        self._gone(key, Lost(reason=reason))

    def hand_back_waiting(self, reason: LossReason) -> None:
        """Drop every block that waits for its first pass."""
        for key, tracked in tuple(self._tracked.items()):
            if tracked.state.stage is Stage.WAITING and not tracked.state.num_passes_here:
                self.lose(key, reason)

    def drop_all(self, reason: LossReason) -> None:
        """Drop every block; pinned ones when their transfers have ended."""
        for key in tuple(self._tracked):
            self.lose(key, reason)

    def expire(self) -> None:
        """Drop the blocks whose deadlines have passed."""
        now = self._clock()
        for key in self._expiries.pop_expired(now):
            tracked = self._tracked.get(key)
            if tracked is not None and tracked.expires_at <= now:
                reason = LossReason(code="deadline", message="the block's deadline has passed")
                self.lose(key, reason)

    def seconds_to_expiry(self) -> float | None:
        """Until the next deadline, ``None`` without any."""
        return self._expiries.seconds_left(self._clock())

    def set_tau(self, tau_tokens: int) -> None:
        """Change the token budget of an iteration; what was carried is forgotten."""
        self.scheduler.tau_tokens = tau_tokens
        self.scheduler.carried_tokens = 0

    def held(self) -> tuple[HeldBlock, ...]:
        """Every block here."""
        return tuple(tracked.held() for tracked in self._tracked.values())

    # -- internals -----------------------------------------------------------------------------

    def _keep(self, tracked: TrackedBlock) -> None:
        self._tracked[tracked.state.key] = tracked
        self._expiries.add(tracked, self._tracked.values(), len(self._tracked))

    def _lost_in_engine(self, key: BlockKey, message: str) -> None:
        self._gone(key, Lost(reason=LossReason(code="engine_error", message=message)))

    def _gone(self, key: BlockKey, last: BlockEvent) -> None:
        del self._tracked[key]
        self._happened.append((key, last))
