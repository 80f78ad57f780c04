"""The Redis ledger: reservations, the waiting lines, and this router's lease.

Decides nothing about where work goes (``sangam_core.placement`` does) nor when a request gives
up (the driver does). It records what was decided, atomically, so that any number of routers agree.

How a driver gets a place (``placing.py`` has this loop ready made)::

    ticket = Ticket(arrival_seconds, request_id)
    waiter = None
    try:
        while True:
            snapshot = await ledger.snapshot()
            worker = place(snapshot.fleet, demand, policy)
            if worker is not None:
                bound = load_bound(snapshot.fleet, demand, policy)
                got = await ledger.reserve_prefill(ticket, key, demand, worker, bound_tokens=bound)
                if isinstance(got, Reservation):
                    break                       # it has left the line as well
                if not got.must_wait:
                    continue                    # the snapshot was stale: look again
            if waiter is None:
                waiter = await ledger.join_line(ticket, limit=...)   # Overloaded when full
            await waiter.wait(timeout_seconds)
    finally:
        await ledger.leave_line(ticket)         # changes nothing after a success

Releases never fail and may be repeated: what Redis cannot be told now it is told when it answers
again. A cancelled call leaves nothing behind: what it was making is finished, then given back.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping

from sangam_core.errors import Unavailable
from sangam_core.geometry import DEFAULT_BLOCK_LENGTH
from sangam_core.lease import LedgerKeys
from sangam_core.placement import Demand, WorkerLoad
from sangam_core.wire import PROTOCOL_VERSION, BlockKey
from sangam_router.ledger.audit import Audit, audit_of
from sangam_router.ledger.compatibility import Service
from sangam_router.ledger.holdings import RecordKind
from sangam_router.ledger.lines import WaitingLines
from sangam_router.ledger.records import FleetSnapshot, Line, Refused, Reservation, Ticket
from sangam_router.ledger.reservations import Reservations
from sangam_router.ledger.scripts import Client, Script, ScriptRunner
from sangam_router.ledger.session import Session
from sangam_router.ledger.snapshots import SharedSnapshots, SnapshotReader
from sangam_router.ledger.tasks import OwnedTasks, raise_if_cancelled
from sangam_router.ledger.waiting import Waiter
from sangam_router.ledger.wakeups import Calls, Wakeups

_HEARTBEATS_PER_LEASE = 3


class Ledger:
    """One router process's access to the ledger of one service (model and protocol version).

    Args:
        redis: a client with ``decode_responses=True`` and socket timeouts (see ``connect``).
        namespace: the deployment's key namespace (``LedgerKeys``).
        router_id: this router's name, for people; the process adds a random part.
        model, protocol: workers with another model or protocol version are not used, and
            requests for them wait in lines of their own.
        block_length: workers with another one are not used either.
        counts_blocks: count the blocks on each worker (``WorkerLoad.num_blocks``), for placements
            that look at them (``placements.counts_blocks``); it costs each reservation a record.
            Blocks placed by routers that do not count them, as those of older versions during a
            rolling update, are not in the numbers.
        lease_seconds: after this long without a heartbeat anyone may reap what this router holds.
        poll_seconds: how often the oldest waiters look, should a wake-up have been lost.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        redis: Client,
        *,
        namespace: str,
        router_id: str,
        model: str,
        protocol: int = PROTOCOL_VERSION,
        block_length: int = DEFAULT_BLOCK_LENGTH,
        counts_blocks: bool = False,
        lease_seconds: float,
        poll_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keys = LedgerKeys(namespace)
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._counts_blocks = counts_blocks
        self._tasks = OwnedTasks()
        self._session = Session(
            ScriptRunner(redis, self.keys.prefix),
            router_id=router_id,
            service=f"{protocol}:{model}",
            lease_seconds=lease_seconds,
            clock=clock,
            on_lease_lost=self._reassert,
        )
        self._reader = SnapshotReader(
            Service(model, protocol, block_length), read_lease=self._read_lease_fields
        )
        self._snapshots = SharedSnapshots(self._take_snapshot, self._tasks)
        self._lines = WaitingLines(self._session, self._tasks)
        self._reservations = Reservations(
            self._session,
            self._lines,
            self._tasks,
            model=model,
            protocol=protocol,
            counts_blocks=counts_blocks,
            on_draft=self._snapshots.note,
        )
        calls = Calls(self._session.owner, self._lines.rooms, on_news=lambda: self._news.set())
        self._wakeups = Wakeups(redis, self.keys.wake_channel, calls, poll_seconds=poll_seconds)
        self._news = asyncio.Event()
        self._observers: list[Callable[[FleetSnapshot], None]] = []

    @property
    def owner(self) -> str:
        """This process's name in Redis."""
        return self._session.owner

    @property
    def is_reachable(self) -> bool:
        """Whether Redis answered the last call."""
        return self._session.answering_since_seconds is not None

    @property
    def answering_since_seconds(self) -> float | None:
        """Since when (on the clock) Redis answers and has kept its data; None while it is away."""
        return self._session.answering_since_seconds

    @property
    def reservations(self) -> tuple[Reservation, ...]:
        """What this router holds now."""
        return tuple(self._reservations.holdings)

    # -- the fleet ------------------------------------------------------------------------

    async def snapshot(self) -> FleetSnapshot:
        """The fleet's load now: one round trip (more only to read the lease of a new worker).

        Includes what this router is just reserving, so decide on it before the next ``await``.

        Raises:
            Unavailable: Redis does not answer.
        """
        return await self._snapshots.get()

    def observe(self, observer: Callable[[FleetSnapshot], None]) -> None:
        """Have every snapshot shown to ``observer`` as well (the fleet view)."""
        self._observers.append(observer)

    # -- reservations ---------------------------------------------------------------------

    async def reserve_prefill(
        self,
        ticket: Ticket,
        key: BlockKey,
        demand: Demand,
        worker: WorkerLoad,
        *,
        bound_tokens: float = math.inf,
    ) -> Reservation | Refused:
        """Reserve budget and pages of a worker for a block's prefill; leaves the line.

        Args:
            worker: as it was in the snapshot that the placement was decided on.
            bound_tokens: refuse (``OVER_THETA``) when o_w has reached this meanwhile; see
                ``placing.load_bound``.

        Raises:
            Unavailable: Redis does not answer; nothing is held.
        """
        return await self._reservations.reserve(
            Line.PREFILL,
            ticket,
            key,
            worker,
            demand,
            bound="" if math.isinf(bound_tokens) else repr(bound_tokens),
        )

    async def reserve_decode(
        self, ticket: Ticket, key: BlockKey, demand: Demand, worker: WorkerLoad
    ) -> Reservation | Refused:
        """Reserve pages of a decode-capable worker for a prefilled block; leaves the decode line.

        Raises:
            Unavailable: Redis does not answer; nothing is held.
        """
        return await self._reservations.reserve(Line.DECODE, ticket, key, worker, demand)

    async def release_load(self, reservation: Reservation) -> None:
        """The prefill's iteration has run: its tokens leave o_w. Repeating changes nothing."""
        await self._reservations.release(reservation, (RecordKind.LOAD,))

    async def release(self, reservation: Reservation) -> None:
        """The block (at the sender: the transfer) has ended: whatever is still held goes.

        Repeating changes nothing.
        """
        await self._reservations.release(reservation, tuple(RecordKind))

    # -- the lines ------------------------------------------------------------------------

    async def join_line(self, ticket: Ticket, *, limit: int | None = None) -> Waiter:
        """Stand in the line for prefills. Joining again returns the same place.

        Args:
            limit: how many may wait, over all routers; None lets the request in at any length
                (one that has begun to answer must not be turned away).

        Raises:
            Overloaded: the line is full.
            Unavailable: Redis does not answer.
        """
        return await self._lines.join(Line.PREFILL, ticket, 0, limit)

    async def join_decode_line(self, ticket: Ticket, num_pages: int) -> Waiter:
        """Stand in the line for decode pages; while it does, prefills leave room for them.

        Raises:
            Unavailable: Redis does not answer.
        """
        return await self._lines.join(Line.DECODE, ticket, num_pages, None)

    async def leave_line(self, ticket: Ticket, line: Line = Line.PREFILL) -> None:
        """Leave a line. Repeating, or leaving after a reservation, changes nothing; never fails."""
        await self._lines.leave(line, ticket)

    def num_waiting_here(self, line: Line = Line.PREFILL) -> int:
        """How many requests of this router stand in a line."""
        return len(self._lines.rooms[line])

    # -- heartbeat ------------------------------------------------------------------------

    async def heartbeat(self) -> None:
        """Renew this router's lease, reap whoever expired, and mend what Redis has lost.

        Raises:
            Unavailable: Redis does not answer.
        """
        *own_heads, fields = await self._session.renew()
        await self._reservations.reconcile(fields)
        for line, member in zip(Line, own_heads, strict=True):
            # An entry that nobody here waits for (its leaving was lost) would hold up everyone.
            if member:
                self._lines.expel(line, member)
        await self._flush()

    async def audit(self) -> Audit:
        """Recompute every counter from the records.

        Raises:
            Unavailable: Redis does not answer.
        """
        return audit_of(await self._session.call(Script.AUDIT))

    async def run(self) -> None:
        """Heartbeats, wake-ups and the slow poll, until cancelled; survives a missing Redis."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wakeups.run(), name="ledger wake-ups")
            group.create_task(self._heartbeats(), name="ledger heartbeats")
            group.create_task(self._follow_news(), name="ledger news")

    async def aclose(self) -> None:
        """Wait for calls that outlived their callers, and release what is left to release.

        What is still held stays until the lease expires: end the drivers first.
        """
        await self._tasks.aclose()
        await self._flush()
        await self._session.aclose()

    # -- internals ------------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):  # then the next beat mends what it must
                await self.heartbeat()
            raise_if_cancelled()
            await asyncio.sleep(self.lease_seconds / _HEARTBEATS_PER_LEASE)

    async def _take_snapshot(self) -> FleetSnapshot:
        taken_at_seconds = self._clock()
        reply = await self._session.call(
            Script.SNAPSHOT, self._session.service, int(self._counts_blocks)
        )
        snapshot = await self._reader.read(reply, taken_at_seconds)
        for observer in self._observers:
            observer(snapshot)
        return snapshot

    async def _follow_news(self) -> None:
        """When the fleet has changed: put back what a returned worker holds, and look at it."""
        while True:
            await self._news.wait()
            self._news.clear()
            with contextlib.suppress(Unavailable):
                await self.heartbeat()
                await self.snapshot()
            raise_if_cancelled()

    async def _flush(self) -> None:
        await self._reservations.flush()
        await self._lines.flush()

    async def _reassert(self) -> None:
        await self._reservations.reassert()
        await self._lines.reassert()

    async def _read_lease_fields(self, worker_id: str) -> Mapping[str, str]:
        flat = await self._session.call(Script.LEASE, worker_id)
        return dict(zip(flat[::2], flat[1::2], strict=True))
