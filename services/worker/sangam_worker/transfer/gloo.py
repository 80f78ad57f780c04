"""KV transport over gloo, for CPUs: a process group of two ranks outside any world.

A pool on a GPU goes through host memory, on the stream that its passes use: slow, and in their way,
but it needs no NCCL.

The receiver's transport keeps one TCP store; each channel meets under a prefix of it. Seen of
gloo: a dead peer ends a waiting call at once; a call honours its time-out and the pair is of no
use after it; dropping one end ends the peer's call; ``abort`` does not wake a waiting call, so an
aborted channel's call ends at its time-out unless the peer drops its end first. The
device comes from the registered address: gloo's own choice, the host name, is often loopback.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from sangam_core.errors import ConfigurationError, TransferError
from sangam_worker.transfer.pool import KVPool
from sangam_worker.transfer.protocol import ANY_NUMBER, KVChannel, Side

_RANKS = {Side.RECEIVER: 0, Side.SENDER: 1}
_BACKLOG = 128
_PAIRS_EACH_WAY = 64
"""A pair costs a few threads and sockets; one that is not in use goes where more are open."""

_LOOK_SECONDS = 0.02
"""How often an end that waits for the other looks whether it is still wanted."""

_SHORTEST_SECONDS = 0.001
"""gloo takes 0 for no time-out at all."""


class _Group(Protocol):
    """What is used of a process group."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...


_MoveLayer = Callable[[_Group, int, Sequence[int], float], int]


class GlooTransport:
    """Channels from and to one pool.

    Args:
        host: the address under which this worker is registered; sockets bind it.

    Raises:
        ConfigurationError: the address is not this machine's.
    """

    name = "gloo"
    staging_bytes = 0
    transfers_each_way = ANY_NUMBER
    pairs_each_way = _PAIRS_EACH_WAY

    def __init__(self, pool: KVPool, host: str) -> None:
        try:
            ProcessGroupGloo.create_device(hostname=host)
        except RuntimeError as error:
            raise ConfigurationError(
                f"SANGAM_ADVERTISE_HOST {host!r}: KV cannot move through it: {_first_line(error)}"
            ) from None
        self._pool = pool
        self._host = host
        self._lock = threading.Lock()
        self._store: TCPStore | None = None

    def offer(self) -> str:
        """The address of this worker's store (one for all channels)."""
        with self._lock:
            if self._store is None:
                self._store = _store_on(self._host)
            return f"{self._host}:{self._store.port}"

    def connect(
        self,
        side: Side,
        communicator: str,
        offer: str,
        timeout_seconds: float,
        given_up: threading.Event,
    ) -> KVChannel:
        """Meet the other side in the receiver's store."""
        deadline = time.monotonic() + timeout_seconds

        def meet() -> KVChannel:
            return self._meet(side, communicator, offer, deadline)

        return _unless_given_up(meet, given_up)

    def ailment(self) -> str | None:
        """Whether the store, which every peer meets at, can be opened."""
        try:
            self.offer()
        except RuntimeError as error:
            return f"gloo cannot open its store at {self._host}: {_first_line(error)}"
        return None

    def close(self) -> None:
        """Give up the store."""
        with self._lock:
            self._store = None

    def _meet(self, side: Side, communicator: str, offer: str, deadline: float) -> KVChannel:
        rank = _RANKS[side]
        try:
            store = PrefixStore(communicator, self._store_at(side, offer, deadline))
            group = _group_of_two(store, rank, self._host, deadline)
        except RuntimeError as error:
            raise TransferError(f"gloo did not connect: {_first_line(error)}") from None
        return GlooChannel(group, peer=1 - rank, pool=self._pool)

    def _store_at(self, side: Side, offer: str, deadline: float) -> TCPStore:
        if side is Side.RECEIVER:
            with self._lock:
                if self._store is None:
                    raise TransferError("the transport is closed")
                return self._store
        host, _, port = offer.rpartition(":")
        if not port.isdigit():
            raise TransferError(f"offer {offer!r} is not HOST:PORT")
        timeout = _timedelta(deadline - time.monotonic())
        return TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)


class GlooChannel:
    """One end of a pair of ranks."""

    def __init__(self, group: _Group, *, peer: int, pool: KVPool) -> None:
        self._group: _Group | None = group
        self._peer = peer
        self._pool = pool
        page = pool.gather(0, (0,))
        self._page_shape, self._dtype, self._device = page.shape[1:], page.dtype, page.device
        self._in_use = threading.Lock()
        self._is_aborted = False

    def send(self, pages: Sequence[int], timeout_seconds: float) -> int:
        """Send pages, layer by layer."""
        return self._each_layer(self._send_layer, pages, timeout_seconds)

    def receive(self, pages: Sequence[int], timeout_seconds: float) -> int:
        """Receive pages, layer by layer."""
        return self._each_layer(self._receive_layer, pages, timeout_seconds)

    def abort(self) -> None:
        """End the channel: at once when no call is in it, else when that has ended."""
        self._is_aborted = True
        if self._in_use.acquire(blocking=False):
            self._group = None
            self._in_use.release()

    def _each_layer(self, move: _MoveLayer, pages: Sequence[int], timeout_seconds: float) -> int:
        deadline = time.monotonic() + timeout_seconds
        num_bytes, failure = 0, None
        with self._in_use:
            try:
                for layer in range(self._pool.num_layers):
                    if self._group is None or self._is_aborted:
                        failure = "the channel was aborted"
                        break
                    num_bytes += move(self._group, layer, pages, deadline)
            except RuntimeError as error:
                failure = f"gloo: {_first_line(error)}"
            # Raised outside the handler: a traceback that still holds the group would keep its
            # sockets open, and the peer waiting.
            if failure is not None:
                self._group = None
        if self._is_aborted:  # abort found the channel in use
            self._group = None
        if failure is not None:
            raise TransferError(failure)
        return num_bytes

    def _send_layer(self, group: _Group, layer: int, pages: Sequence[int], deadline: float) -> int:
        values = self._pool.gather(layer, pages).cpu()
        _wait(group.send([values], self._peer, layer), deadline)
        return values.nbytes

    def _receive_layer(
        self, group: _Group, layer: int, pages: Sequence[int], deadline: float
    ) -> int:
        values = torch.empty((len(pages), *self._page_shape), dtype=self._dtype)
        _wait(group.recv([values], self._peer, layer), deadline)
        if not self._is_aborted:
            self._pool.scatter(layer, pages, values.to(self._device))
            if self._device.type == "cuda":  # passes may have a stream of their own
                torch.cuda.current_stream(self._device).synchronize()
        return values.nbytes


def _store_on(host: str) -> TCPStore:
    """A store that listens at the host's address alone; its own socket would at every one.

    Raises:
        RuntimeError: nothing can listen there.
    """
    listening = _listening_at(host)
    port = listening.getsockname()[1]
    # From here on the store closes it.
    return TCPStore(
        host, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _listening_at(host: str) -> socket.socket:
    """A socket at the first of the host's addresses that takes one."""
    failure: OSError | None = None
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            listening = socket.socket(family, kind, protocol)
            try:
                listening.bind(address)
                listening.listen(_BACKLOG)
            except OSError as error:
                listening.close()
                failure = error
            else:
                return listening
    except OSError as error:
        failure = error
    raise RuntimeError(f"nothing can listen at {host}: {failure}")


def _unless_given_up(meet: Callable[[], KVChannel], given_up: threading.Event) -> KVChannel:
    """Meet in a thread beside, which cannot be woken: given up, it ends by itself, unheard."""
    met: Future[KVChannel] = Future()

    def run() -> None:
        try:
            met.set_result(meet())
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            met.set_exception(error)

    threading.Thread(target=run, name="kv meet", daemon=True).start()
    while not wait([met], _LOOK_SECONDS).done:
        if given_up.is_set():
            raise TransferError("gloo did not connect: the channel was aborted")
    return met.result()


def _group_of_two(store: Store, rank: int, host: str, deadline: float) -> _Group:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent in stubs
    options._timeout = _timedelta(deadline - time.monotonic())
    options._threads = 1
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    group: Any = ProcessGroupGloo(store, rank, 2, options)
    return cast("_Group", group)


def _wait(work: Work, deadline: float) -> None:
    work.wait(_timedelta(deadline - time.monotonic()))


def _timedelta(seconds: float) -> timedelta:
    return timedelta(seconds=max(_SHORTEST_SECONDS, seconds))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
