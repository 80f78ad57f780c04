"""Who of a router's waiters looks: only ever the oldest, and never too late."""

import pytest

from sangam_router.ledger import Line, Ticket, Waiter
from sangam_router.ledger.waiting import WaitingRoom
from sangam_router.ledger.wakeups import Calls


def waiter(number: int) -> Waiter:
    ticket = Ticket(float(number), f"r{number}")
    return Waiter(ticket, f"r{number}\x1fme\x1f0")


async def is_signalled(waiter: Waiter) -> bool:
    return await waiter.wait(0.0)


def room_of(*numbers: int) -> tuple[WaitingRoom, dict[int, Waiter]]:
    room, waiters = WaitingRoom(), {number: waiter(number) for number in numbers}
    for each in waiters.values():
        room.add(each)
    return room, waiters


async def test_the_first_one_in_looks_at_once() -> None:
    _, waiters = room_of(1)
    assert await is_signalled(waiters[1])
    assert not await is_signalled(waiters[1])


async def test_a_younger_one_does_not_look_until_the_older_has_left() -> None:
    room, waiters = room_of(1, 2, 3)
    assert not await is_signalled(waiters[2])
    room.remove(waiters[1].ticket)
    assert await is_signalled(waiters[2])
    assert not await is_signalled(waiters[3])


async def test_an_older_one_that_comes_later_looks_at_once() -> None:
    room, waiters = room_of(5)
    assert await is_signalled(waiters[5])
    older = waiter(4)
    room.add(older)
    assert await is_signalled(older)
    assert room.is_behind(waiters[5].ticket)
    assert not room.is_behind(older.ticket)


async def test_a_younger_one_that_leaves_wakes_nobody() -> None:
    room, waiters = room_of(1, 2)
    assert await is_signalled(waiters[1])
    room.remove(waiters[2].ticket)
    assert not await is_signalled(waiters[1])


async def test_a_signal_while_looking_is_not_lost() -> None:
    room, waiters = room_of(1)
    assert await waiters[1].wait(1.0)
    room.signal_oldest()
    assert await waiters[1].wait(1.0)


def test_leaving_twice_and_an_empty_room_change_nothing() -> None:
    room, waiters = room_of(1)
    assert room.remove(waiters[1].ticket) is waiters[1]
    assert room.remove(waiters[1].ticket) is None
    room.signal_oldest()
    assert len(room) == 0


def test_a_room_knows_its_own_entries() -> None:
    room, _ = room_of(1)
    assert room.holds("r1\x1fme\x1f0")
    assert not room.holds("r1\x1fme\x1f4")
    assert not room.holds("r2\x1fme\x1f0")


def test_waiters_come_oldest_first() -> None:
    room, _ = room_of(3, 1, 2)
    assert [each.ticket.request_id for each in room] == ["r1", "r2", "r3"]


class Rooms:
    """The two rooms with an old and a young waiter each, and a listener of router ``me``."""

    def __init__(self) -> None:
        self.rooms = {line: WaitingRoom() for line in Line}
        self.waiters: dict[tuple[Line, int], Waiter] = {}
        self.num_news = 0
        for line, room in self.rooms.items():
            for number in (1, 2):
                self.waiters[line, number] = each = waiter(number)
                room.add(each)

    async def heard(self, message: str) -> set[tuple[Line, int]]:
        """Whom a message signals."""
        await self._signalled()
        calls = Calls("me", self.rooms, self._count)
        calls.heard(message)
        return await self._signalled()

    def _count(self) -> None:
        self.num_news += 1

    async def _signalled(self) -> set[tuple[Line, int]]:
        return {key for key, each in self.waiters.items() if await is_signalled(each)}


PREFILL, DECODE = (Line.PREFILL, 1), (Line.DECODE, 1)


@pytest.mark.parametrize(
    ("message", "signalled", "num_news"),
    [
        ("head\x1fme\x1fother", {PREFILL}, 0),
        ("head\x1fother\x1fme", {DECODE}, 0),
        ("head\x1fme\x1fme", {PREFILL, DECODE}, 0),
        ("head\x1fother\x1f", set(), 0),
        ("w1", {PREFILL, DECODE}, 1),
        ("reaped", {PREFILL, DECODE}, 1),
        ("head", {PREFILL, DECODE}, 1),
        ("", {PREFILL, DECODE}, 1),
    ],
)
async def test_a_message_signals_the_oldest_of_the_lines_it_concerns(
    message: str, signalled: set[tuple[Line, int]], num_news: int
) -> None:
    rooms = Rooms()
    assert await rooms.heard(message) == signalled
    assert rooms.num_news == num_news
