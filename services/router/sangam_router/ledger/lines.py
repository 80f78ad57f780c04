"""Standing in the two waiting lines: joining, leaving, and putting entries back.

Decides nothing about the order (the scripts hold it) nor who looks when (``waiting``). Used by
``ledger`` and ``reservations``.
"""

import asyncio

from sangam_core.errors import Overloaded, Unavailable
from sangam_router.ledger.records import UNIT_SEPARATOR, Line, Ticket
from sangam_router.ledger.scripts import Script, UnknownRouter, Unreachable
from sangam_router.ledger.session import Session
from sangam_router.ledger.tasks import OwnedTasks, SharedRuns
from sangam_router.ledger.waiting import Waiter, WaitingRoom


class WaitingLines:
    """This router's entries in both lines of its service.

    Attributes:
        rooms: who of this router waits, by line.
    """

    def __init__(self, session: Session, tasks: OwnedTasks) -> None:
        self.rooms = {line: WaitingRoom() for line in Line}
        self._session = session
        self._tasks = tasks
        self._departures: dict[tuple[Line, str], None] = {}
        self._flushes = SharedRuns(self._flush, tasks)

    def member(self, ticket: Ticket, num_pages: int) -> str:
        """A request's entry in a line."""
        return UNIT_SEPARATOR.join((ticket.request_id, self._session.owner, str(num_pages)))

    async def join(self, line: Line, ticket: Ticket, num_pages: int, limit: int | None) -> Waiter:
        """Stand in a line; see ``Ledger.join_line``."""
        room = self.rooms[line]
        known = room.get(ticket)
        if known is not None:
            return known
        waiter = Waiter(ticket, self.member(ticket, num_pages))
        # In the room before in Redis: a heartbeat must not take the entry for an orphan.
        room.add(waiter)
        self._departures.pop((line, waiter.member), None)
        try:
            await self._tasks.finish(self._enter(line, waiter, limit))
        except asyncio.CancelledError:
            # A join still under way sees that the room is empty, and leaves again itself.
            self._tasks.start(self.leave(line, ticket))
            raise
        except BaseException:
            room.remove(ticket)
            raise
        return waiter

    async def leave(self, line: Line, ticket: Ticket) -> None:
        """Leave a line; see ``Ledger.leave_line``."""
        waiter = self.rooms[line].remove(ticket)
        if waiter is not None:
            self._departures[line, waiter.member] = None
            await self._flushes.run()

    def expel(self, line: Line, member: str) -> None:
        """Have the next ``flush`` remove an entry that nobody here waits for."""
        if not self.rooms[line].holds(member):
            self._departures[line, member] = None

    async def flush(self) -> None:
        """Tell Redis who has left; what it misses is told with the next flush."""
        if self._departures:
            await self._flushes.run()

    async def reassert(self) -> None:
        """Put every entry back, in order, after Redis has lost them.

        Raises:
            Unreachable, UnknownRouter: as ``Session.call_fenced_once``.
        """
        await asyncio.gather(
            *(
                self._session.call_fenced_once(
                    Script.JOIN, *self._join_arguments(line, waiter, None)
                )
                for line, room in self.rooms.items()
                for waiter in room
            )
        )

    async def _flush(self) -> None:
        departures = tuple(self._departures)
        if not departures:
            return
        try:
            # First the new fence, if any: what it shuts out cannot undo the leaving.
            await self._session.register()
            for line in Line:
                members = [member for where, member in departures if where is line]
                if members:
                    await self._session.call_once(
                        Script.LEAVE, self._session.service, line.value, *members
                    )
        except (Unreachable, UnknownRouter):
            return
        for departure in departures:
            self._departures.pop(departure, None)

    async def _enter(self, line: Line, waiter: Waiter, limit: int | None) -> None:
        try:
            reply = await self._session.call(
                Script.JOIN, *self._join_arguments(line, waiter, limit)
            )
        except Unavailable:
            self._departures[line, waiter.member] = None
            raise
        if reply == "full":
            raise Overloaded(f"{limit} requests are waiting already; try again later")
        if not self.rooms[line].holds(waiter.member):
            self._departures[line, waiter.member] = None
            await self.flush()

    def _join_arguments(
        self, line: Line, waiter: Waiter, limit: int | None
    ) -> tuple[str | int, ...]:
        arrival = repr(waiter.ticket.arrival_seconds)
        most = "" if limit is None else limit
        return (self._session.service, line.value, arrival, waiter.member, most)
