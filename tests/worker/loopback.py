"""KV transport within one process: for tests of everything above the wire.

Keeps the protocol to the letter, aborts and deadlines included, and wakes waiting calls at once.
Workers that share a ``LoopbackHub`` reach each other.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from sangam_core.errors import TransferError
from sangam_worker.transfer.pool import KVPool
from sangam_worker.transfer.protocol import ANY_NUMBER, KVChannel, Side

_LOOK_SECONDS = 0.01
"""How often an end that waits for the other looks whether it is still wanted."""


@dataclass(eq=False)
class _Wire:
    """What two ends share. ``changed`` guards all of it."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    sides: set[Side] = field(default_factory=set)
    layers: list[torch.Tensor] = field(default_factory=list)
    is_cut: bool = False


class LoopbackHub:
    """Where channels meet. ``cut_all`` is what a lost network does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wires: dict[str, _Wire] = {}

    def wire(self, communicator: str) -> _Wire:
        """The wire of a channel's name."""
        with self._lock:
            return self._wires.setdefault(communicator, _Wire())

    def cut_all(self) -> None:
        """Fail every channel that is connected now."""
        with self._lock:
            wires, self._wires = tuple(self._wires.values()), {}
        for wire in wires:
            with wire.changed:
                wire.is_cut = True
                wire.changed.notify_all()


class LoopbackTransport:
    """Channels between pools of one process."""

    name = "loopback"
    staging_bytes = 0
    transfers_each_way = ANY_NUMBER
    pairs_each_way = ANY_NUMBER

    def __init__(self, pool: KVPool, hub: LoopbackHub) -> None:
        self._pool = pool
        self._hub = hub

    def offer(self) -> str:
        """Nothing needs to be known."""
        return "loopback"

    def connect(
        self,
        side: Side,
        communicator: str,
        offer: str,
        timeout_seconds: float,
        given_up: threading.Event,
    ) -> KVChannel:
        """Meet the other side on the hub."""
        deadline = time.monotonic() + timeout_seconds
        wire = self._hub.wire(communicator)
        with wire.changed:
            wire.sides.add(side)
            wire.changed.notify_all()
            while not (len(wire.sides) == 2 or wire.is_cut or time.monotonic() > deadline):
                if given_up.is_set():
                    raise TransferError("the channel was aborted")
                wire.changed.wait(_LOOK_SECONDS)
            _wait(wire, lambda: len(wire.sides) == 2, deadline)
        return LoopbackChannel(wire, self._pool)

    def ailment(self) -> str | None:
        """A wire in memory is always there."""
        return None

    def close(self) -> None:
        """Hold nothing."""


class LoopbackChannel:
    """One end of a wire; a layer at a time is on it."""

    def __init__(self, wire: _Wire, pool: KVPool) -> None:
        self._wire = wire
        self._pool = pool

    def send(self, pages: Sequence[int], timeout_seconds: float) -> int:
        """Send pages, layer by layer."""
        deadline = time.monotonic() + timeout_seconds
        wire, num_bytes = self._wire, 0
        for layer in range(self._pool.num_layers):
            values = self._pool.gather(layer, pages)
            with wire.changed:
                _wait(wire, lambda: not wire.layers, deadline)
                wire.layers.append(values)
                wire.changed.notify_all()
            num_bytes += values.nbytes
        with wire.changed:
            _wait(wire, lambda: not wire.layers, deadline)
        return num_bytes

    def receive(self, pages: Sequence[int], timeout_seconds: float) -> int:
        """Receive pages, layer by layer."""
        deadline = time.monotonic() + timeout_seconds
        wire, num_bytes = self._wire, 0
        for layer in range(self._pool.num_layers):
            with wire.changed:
                _wait(wire, lambda: bool(wire.layers), deadline)
                values = wire.layers.pop()
                wire.changed.notify_all()
            self._pool.scatter(layer, pages, values)
            num_bytes += values.nbytes
        return num_bytes

    def abort(self) -> None:
        """Cut the wire; both ends notice at once."""
        with self._wire.changed:
            self._wire.is_cut = True
            self._wire.changed.notify_all()


def _wait(wire: _Wire, is_met: Callable[[], bool], deadline: float) -> None:
    """Wait, the lock held, until a condition is met. ``TransferError`` when cut or late."""
    wire.changed.wait_for(lambda: wire.is_cut or is_met(), deadline - time.monotonic())
    if wire.is_cut:
        raise TransferError("the channel was aborted")
    if not is_met():
        raise TransferError("the transfer's deadline has passed")
