"""The pairs that are open, and which of them is closed for another's sake.

As many may be open on either side as the transport has memory for; one that nobody uses is closed
when a further one is needed, and after a while without a transfer: its peer may be gone for good.
Whoever wants it again opens it again.

A transfer's two ends are not over at the same moment, so that whoever closes a pair asks the peer
first, which answers when it does not use its end any more. After a failure nobody waits: the peer's
end is ended in use. Called by ``exchange``, on the event loop.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress

from sangam_worker.transfer.pairs import Pair, PairKey
from sangam_worker.transfer.protocol import KVTransport, Side

_IDLE_SECONDS = 600.0
"""A pair that moves nothing for this long is given up."""

_END_SECONDS = 2.0
"""How long the end of a transfer may lag behind its other end's."""

TellPeer = Callable[[Pair, bool], Coroutine[None, None, None]]
"""Tells a pair's peer that it is closed, and whether after a failure. Does not fail."""

Start = Callable[[Coroutine[None, None, None], str], object]
"""Runs something beside, under a name."""


class OpenPairs:
    """One worker's pairs."""

    def __init__(self, transport: KVTransport, tell: TellPeer, start: Start) -> None:
        self._transport = transport
        self._tell = tell
        self._start = start
        self._pairs: dict[PairKey, Pair] = {}
        self._opening = asyncio.Lock()
        self._sweep: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._pairs)

    def get(self, key: PairKey) -> Pair | None:
        """The open pair of a key."""
        return self._pairs.get(key)

    async def open(self, key: PairKey, communicator: str, offer: str, peer_url: str) -> Pair:
        """A new pair; others are closed first where it takes their place."""
        async with self._opening:
            for pair in tuple(self._pairs.values()):
                if (pair.key.side, pair.key.peer_id) == (key.side, key.peer_id):
                    self.drop(pair)  # of a former life, or given up by the peer
            while self._num_open(key.side) >= self._transport.pairs_each_way:
                if (least := self._least_wanted(key.side)) is None:
                    break
                await self.close(least)
            pair = self._pairs[key] = Pair(key, self._transport, communicator, offer, peer_url)
            if self._sweep is None:
                self._sweep_later()
            return pair

    def drop(self, pair: Pair) -> bool:
        """End a pair of which the peer has no end any more; whether it was open."""
        pair.abort()
        return self._remove(pair)

    def fail(self, pair: Pair) -> None:
        """End a pair whose ends may disagree on what has been moved."""
        if self.drop(pair):
            self._start(self._tell(pair, True), f"tell {pair.key.peer_id}")

    async def close(self, pair: Pair) -> None:
        """End a pair that nobody uses here, when nobody uses its other end either."""
        is_taken_up = not pair.unused.is_set()  # since it was found to be idle
        if is_taken_up or not self._remove(pair):
            return
        try:
            # A receiver that asks for it uses its end for nothing else, and is refused at once.
            if not (pair.num_waiting and pair.key.side is Side.SENDER):
                await self._tell(pair, False)
        finally:
            pair.abort()

    async def closed_by_peer(self, communicator: str, *, is_failure: bool) -> None:
        """The other end is going or gone."""
        for pair in tuple(self._pairs.values()):
            if pair.communicator == communicator:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0 if is_failure else _END_SECONDS):
                        await pair.unused.wait()
                self.drop(pair)

    async def close_all(self) -> None:
        """End every pair, those in use too."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        pairs = tuple(self._pairs.values())
        for pair in pairs:
            if not pair.unused.is_set():
                self.fail(pair)
        await asyncio.gather(*(self.close(pair) for pair in pairs))

    def _remove(self, pair: Pair) -> bool:
        if self._pairs.get(pair.key) is not pair:
            return False
        del self._pairs[pair.key]
        return True

    def _num_open(self, side: Side) -> int:
        return sum(key.side is side for key in self._pairs)

    def _least_wanted(self, side: Side) -> Pair | None:
        """The pair that is closed first; ``None`` while all are in use."""
        mine = (each for key, each in self._pairs.items() if key.side is side)
        return min((each for each in mine if each.unused.is_set()), key=_wantedness, default=None)

    def _sweep_later(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        self._sweep = None
        now = time.monotonic()
        for pair in tuple(self._pairs.values()):
            is_needed = pair.num_waiting or not pair.unused.is_set()
            if not is_needed and now - pair.last_used_seconds >= _IDLE_SECONDS:
                self._start(self.close(pair), f"close {pair.key.peer_id}")
        if self._pairs:
            self._sweep_later()


def _wantedness(pair: Pair) -> tuple[bool, float]:
    """Least for whom nobody waits and that was used longest ago.

    Only where all are waited for, one of these goes: the one used last, which is last in turn.
    """
    is_waited_for = pair.num_waiting > 0
    return is_waited_for, -pair.last_used_seconds if is_waited_for else pair.last_used_seconds
