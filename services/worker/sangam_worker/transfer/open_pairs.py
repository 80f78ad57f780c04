"""The pairs that are open, and which of them is closed for another's sake.

As many may be open on either side as the transport has memory for; one that nobody uses is closed
when a further one is needed, and after a while without a transfer: its peer may be gone for good.
Whoever wants it again opens it again. Called by ``exchange``, on the event loop.
"""

import asyncio
import time
from collections.abc import Callable

from sangam_worker.transfer.pairs import Pair, PairKey
from sangam_worker.transfer.protocol import KVTransport, Side

_IDLE_SECONDS = 600.0
"""A pair that moves nothing for this long is given up."""


class OpenPairs:
    """One worker's pairs.

    Args:
        on_close: called with each pair that this end has closed of itself.
    """

    def __init__(self, transport: KVTransport, on_close: Callable[[Pair], None]) -> None:
        self._transport = transport
        self._on_close = on_close
        self._pairs: dict[PairKey, Pair] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._pairs)

    def get(self, key: PairKey) -> Pair | None:
        """The open pair of a key."""
        return self._pairs.get(key)

    def open(self, key: PairKey, communicator: str, offer: str, peer_url: str) -> Pair:
        """A new pair; others are closed where it takes their place."""
        for pair in tuple(self._pairs.values()):
            if (pair.key.side, pair.key.peer_id) == (key.side, key.peer_id):
                self.close(pair)  # of a former life
        while self._num_open(key.side) >= self._transport.pairs_each_way:
            if (least := self._least_wanted(key.side)) is None:
                break
            self.close(least)
        pair = self._pairs[key] = Pair(key, self._transport, communicator, offer, peer_url)
        if self._sweep is None:
            self._sweep_later()
        return pair

    def close(self, pair: Pair) -> None:
        """End a pair; a transfer under way fails."""
        if self._drop(pair):
            self._on_close(pair)

    def closed_by_peer(self, communicator: str) -> None:
        """The other end is gone."""
        for pair in tuple(self._pairs.values()):
            if pair.communicator == communicator:
                self._drop(pair)

    def close_all(self) -> None:
        """End every pair."""
        for pair in tuple(self._pairs.values()):
            self.close(pair)
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _drop(self, pair: Pair) -> bool:
        """Whether the pair was open."""
        pair.abort()
        if self._pairs.get(pair.key) is not pair:
            return False
        del self._pairs[pair.key]
        return True

    def _num_open(self, side: Side) -> int:
        return sum(key.side is side for key in self._pairs)

    def _least_wanted(self, side: Side) -> Pair | None:
        """The pair that is closed first; ``None`` while all are in use."""
        idle = (each for each in self._pairs.values() if each.key.side is side)
        return min((each for each in idle if not each.num_users), key=_wantedness, default=None)

    def _sweep_later(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        self._sweep = None
        now = time.monotonic()
        for pair in tuple(self._pairs.values()):
            is_needed = pair.num_users or pair.num_waiting
            if not is_needed and now - pair.last_used_seconds >= _IDLE_SECONDS:
                self.close(pair)
        if self._pairs:
            self._sweep_later()


def _wantedness(pair: Pair) -> tuple[bool, float]:
    """Least for whom nobody waits and that was used longest ago.

    Only where all are waited for, one of these goes: the one used last, which is last in turn.
    """
    is_waited_for = pair.num_waiting > 0
    return is_waited_for, -pair.last_used_seconds if is_waited_for else pair.last_used_seconds
