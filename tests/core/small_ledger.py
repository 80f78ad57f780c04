"""The Redis ledger's idea in memory: two records per placement, counters that only they change.

``load`` (tokens) is gone when the prefill's iteration has run, ``pages`` when the block has left
the worker. Releasing twice, or after the worker was reaped, changes nothing.
"""

from collections import Counter
from dataclasses import dataclass, field

from sangam_core.wire import BlockKey

Place = tuple[str, str]
"""Worker id and epoch."""


@dataclass(slots=True)
class SmallLedger:
    """Reservations of one fleet."""

    _loads: dict[BlockKey, tuple[Place, int]] = field(default_factory=dict)
    _pages: dict[tuple[BlockKey, str], tuple[Place, int]] = field(default_factory=dict)
    _load_tokens: Counter[str] = field(default_factory=Counter)
    _num_pages: Counter[str] = field(default_factory=Counter)

    def reserve_load(self, key: BlockKey, place: Place, tokens: int) -> None:
        """Add a prefill to a worker's o_w."""
        assert key not in self._loads
        self._loads[key] = (place, tokens)
        self._load_tokens[place[0]] += tokens

    def reserve_pages(self, key: BlockKey, place: Place, num_pages: int) -> None:
        """Take pages of a worker."""
        assert (key, place[0]) not in self._pages
        self._pages[key, place[0]] = (place, num_pages)
        self._num_pages[place[0]] += num_pages

    def release_load(self, key: BlockKey) -> None:
        """The prefill's iteration has run, or never will."""
        record = self._loads.pop(key, None)
        if record is not None:
            (worker_id, _), tokens = record
            self._load_tokens[worker_id] -= tokens

    def release_pages(self, key: BlockKey, worker_id: str) -> None:
        """The block has left the worker."""
        record = self._pages.pop((key, worker_id), None)
        if record is not None:
            self._num_pages[worker_id] -= record[1]

    def reap(self, worker_id: str, epoch: str) -> None:
        """Drop the records of a dead worker's epoch."""
        place = (worker_id, epoch)
        for key in [key for key, record in self._loads.items() if record[0] == place]:
            self.release_load(key)
        for key, holder in [names for names, record in self._pages.items() if record[0] == place]:
            self.release_pages(key, holder)

    def load_tokens(self, worker_id: str) -> int:
        """o_w: reserved prefill tokens whose iteration has not run."""
        return self._load_tokens[worker_id]

    def pages(self, worker_id: str) -> int:
        """Pages reserved on a worker."""
        return self._num_pages[worker_id]

    @property
    def num_records(self) -> int:
        """Records that exist."""
        return len(self._loads) + len(self._pages)
