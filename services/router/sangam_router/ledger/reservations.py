"""Making and releasing reservations, and putting them back when Redis has lost them.

Decides how a reservation survives a cancelled caller, a lost reply and an emptied Redis; what may
be reserved is decided by the scripts. Used by ``ledger``.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from sangam_core.placement import Demand, WorkerLoad
from sangam_core.wire import BlockKey
from sangam_router.ledger.holdings import Held, Holdings, RecordKind
from sangam_router.ledger.lines import WaitingLines
from sangam_router.ledger.records import Line, RefusalReason, Refused, Reservation, Ticket
from sangam_router.ledger.scripts import Script, UnknownRouter, Unreachable
from sangam_router.ledger.session import Session
from sangam_router.ledger.tasks import OwnedTasks, SharedRuns

_Call = tuple[Script, *tuple[str | int, ...]]
"""A script and its arguments."""

_RESTORE_AT_ONCE = 500
"""Reservations restored by one script call: bounds how long it holds Redis up."""


class Reservations:
    """This router's reservations.

    Args:
        model, protocol: checked against the worker's lease by the scripts.
        counts_blocks: whether reservations of pages have a blocks record as well.
        on_draft: told of every reservation before it is asked for.
    """

    def __init__(
        self,
        session: Session,
        lines: WaitingLines,
        tasks: OwnedTasks,
        *,
        model: str,
        protocol: int,
        counts_blocks: bool,
        on_draft: Callable[[Reservation], None],
    ) -> None:
        self.holdings = Holdings()
        self._session = session
        self._lines = lines
        self._tasks = tasks
        self._model = model
        self._protocol = protocol
        self._counts_blocks = counts_blocks
        self._on_draft = on_draft
        self._flushes = SharedRuns(self._flush, tasks)

    async def reserve(
        self,
        line: Line,
        ticket: Ticket,
        key: BlockKey,
        worker: WorkerLoad,
        demand: Demand,
        *,
        bound: str = "",
    ) -> Reservation | Refused:
        """Reserve, or say why not; see ``Ledger.reserve_prefill`` and ``reserve_decode``."""
        if self._lines.rooms[line].is_behind(ticket):
            return Refused(RefusalReason.OLDER_WAITS)  # the script would say the same
        draft = Reservation(
            serial=self.holdings.next_serial(),
            key=key,
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            cost_tokens=0 if line is Line.DECODE else demand.cost_tokens,
            num_pages=demand.num_pages,
            num_blocks=int(self._counts_blocks and demand.num_pages > 0),
        )
        self._on_draft(draft)
        call = self._call(line, ticket, draft, worker, demand, bound)
        attempt = self._tasks.start(self._attempt(line, ticket, draft, call))
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            attempt.add_done_callback(self._give_back)
            raise

    async def release(self, reservation: Reservation, kinds: Iterable[RecordKind]) -> None:
        """Release records; what was released before is left out. Never fails."""
        self.holdings.let_go(reservation, kinds)
        if self.holdings.releases:
            await self._flushes.run()

    async def flush(self) -> None:
        """Tell Redis what is released; what it misses is told with the next flush."""
        if self.holdings.releases:
            await self._flushes.run()

    async def reassert(self) -> None:
        """Put everything back after Redis has lost it.

        Raises:
            Unreachable, UnknownRouter: as ``Session.call_fenced_once``.
        """
        await self._restore(self.holdings.all_held())

    async def reconcile(self, present: Iterable[str]) -> None:
        """Make the records in Redis those that this router holds.

        They differ after a fail-over to a stale replica, and while a worker whose lease was lost
        with everything else has not come back: its records are put back when it has.

        Args:
            present: the fields of this router's records in Redis.
        """
        self.holdings.delete(field for field in present if not self.holdings.knows(field))
        known = set(present)
        missing = [held for held in self.holdings.all_held() if not known >= {*held.fields}]
        with contextlib.suppress(Unreachable, UnknownRouter):  # the next heartbeat tries again
            await self._restore(missing)

    # -- internals ------------------------------------------------------------------------

    async def _flush(self) -> None:
        fields = self.holdings.releases
        if not fields:
            return
        session = self._session
        try:
            # First the new fence, if any: what it shuts out cannot undo the deletion.
            await session.register()
            await session.call_once(Script.RELEASE, session.owner, session.service, *fields)
        except (Unreachable, UnknownRouter):
            return
        self.holdings.confirm(fields)

    async def _attempt(
        self, line: Line, ticket: Ticket, draft: Reservation, call: _Call
    ) -> Reservation | Refused:
        try:
            reply = await self._session.call(*call)
        except BaseException:
            self.holdings.doubt(draft.serial)
            raise
        if reply != "ok":
            self.holdings.settle(draft.serial, None)
            return Refused(RefusalReason(reply))
        self.holdings.settle(draft.serial, draft)
        self._lines.rooms[line].remove(ticket)
        return draft

    def _call(
        self,
        line: Line,
        ticket: Ticket,
        draft: Reservation,
        worker: WorkerLoad,
        demand: Demand,
        bound: str,
    ) -> _Call:
        is_decode = line is Line.DECODE
        return (
            Script.RESERVE_DECODE if is_decode else Script.RESERVE_PREFILL,
            self._session.service,
            draft.serial,
            str(draft.key),
            repr(ticket.arrival_seconds),
            self._lines.member(ticket, draft.num_pages if is_decode else 0),
            worker.worker_id,
            worker.epoch,
            worker.role.value,
            self._model,
            self._protocol,
            demand.cost_tokens,
            draft.cost_tokens,
            draft.num_pages,
            draft.num_blocks,
            bound,
        )

    def _give_back(self, attempt: "asyncio.Task[Reservation | Refused]") -> None:
        """The caller went away while its reservation was being made."""
        if not attempt.cancelled() and attempt.exception() is None:
            got = attempt.result()
            if isinstance(got, Reservation):
                self._tasks.start(self.release(got, tuple(RecordKind)))

    async def _restore(self, held: Sequence[Held]) -> None:
        for start in range(0, len(held), _RESTORE_AT_ONCE):
            batch = held[start : start + _RESTORE_AT_ONCE]
            fields = [field for item in batch for field in item.fields]
            arguments = [value for item in batch for value in _restore_arguments(item)]
            await self._session.call_fenced_once(Script.RESTORE, *arguments)
            # What was released meanwhile may have been restored after its deletion.
            self.holdings.delete(field for field in fields if not self.holdings.knows(field))


def _restore_arguments(held: Held) -> tuple[str | int, ...]:
    """One group of ``restore.lua``."""
    what = held.reservation
    return (
        what.serial,
        str(what.key),
        what.worker_id,
        what.epoch,
        *(held.amounts.get(kind, 0) for kind in RecordKind),
    )
