"""Who of this router's waiting requests looks for a place, and when.

The order is strict, so only the head of a line can get a place. Of this router's waiters only the
oldest can be the head: it alone is signalled, and when it leaves, the next oldest is. A release
in Redis names the router of the head, so that one waiter in the whole deployment looks, however
many wait. The slow poll behind it signals the oldest of each router.

One ``WaitingRoom`` a line. No I/O; the ledger puts requests in, ``wakeups`` signals.
"""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Iterator

from sangam_router.ledger.records import UNIT_SEPARATOR, Ticket


class Waiter:
    """One request's place in a line, as long as it stands there.

    Attributes:
        member: its entry in the line in Redis.
    """

    def __init__(self, ticket: Ticket, member: str) -> None:
        self.ticket = ticket
        self.member = member
        self._signal = asyncio.Event()

    def signal(self) -> None:
        """Make the current or next ``wait`` return."""
        self._signal.set()

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait until it is worth looking for a place again.

        A signal that comes while the request is looking makes the next wait return at once, so
        none is lost. Returns whether it was signalled; False when the time is over.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._signal.wait()
        except TimeoutError:
            return False
        self._signal.clear()
        return True


class WaitingRoom:
    """This router's waiters in one line, oldest first."""

    def __init__(self) -> None:
        self._waiters: dict[str, Waiter] = {}
        self._order: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Waiter]:
        return iter([self._waiters[ticket.request_id] for ticket in self._order])

    def get(self, ticket: Ticket) -> Waiter | None:
        """The waiter of a request that stands here."""
        return self._waiters.get(ticket.request_id)

    def holds(self, member: str) -> bool:
        """Whether an entry of the line in Redis belongs to a request that stands here."""
        waiter = self._waiters.get(member.partition(UNIT_SEPARATOR)[0])
        return waiter is not None and waiter.member == member

    def is_behind(self, ticket: Ticket) -> bool:
        """Whether an older request stands here."""
        return bool(self._order) and self._order[0] < ticket

    def add(self, waiter: Waiter) -> None:
        """Let a request in; it looks at once if it is the oldest."""
        assert waiter.ticket.request_id not in self._waiters, "one place in a line a request"
        self._waiters[waiter.ticket.request_id] = waiter
        insort(self._order, waiter.ticket)
        if self._order[0] == waiter.ticket:
            waiter.signal()

    def remove(self, ticket: Ticket) -> Waiter | None:
        """Let a request out; the next oldest looks. None when it does not stand here."""
        waiter = self._waiters.pop(ticket.request_id, None)
        if waiter is None:
            return None
        index = bisect_left(self._order, waiter.ticket)
        del self._order[index]
        if index == 0:
            self.signal_oldest()
        return waiter

    def signal_oldest(self) -> None:
        """Make the oldest look."""
        if self._order:
            self._waiters[self._order[0].request_id].signal()
