"""A non-blocking NCCL communicator, and waiting for it: with a deadline, until it is given up.

Its calls return at once; whether they came to anything is asked for again and again, in the thread
that made them, never inside NCCL. Only ending it may come from another thread, for the case that
a call is stuck after all. Called by ``nccl``.
"""

import threading
import time
from collections.abc import Callable

import structlog

from sangam_core.errors import TransferError
from sangam_worker.transfer.lanes import SideStreams
from sangam_worker.transfer.nccl_library import IN_PROGRESS, SUCCESS, Communicator, Nccl

log = structlog.get_logger(__name__)

_SHORTEST_PAUSE_SECONDS = 20e-6
"""A queued send takes NCCL about this long; a transfer has dozens."""

_LONGEST_PAUSE_SECONDS = 500e-6
"""Short against a transfer, long enough to leave the interpreter to the GPU thread."""


NOT_NCCLS = (TransferError, TypeError, AttributeError)
"""What passes through a call into NCCL as it is: the bindings' own exceptions have no base in
common, and are none of Python's two for a call that cannot be made so, which is a bug of ours."""


class Link:
    """One communicator. One thread uses it at a time; ``give_up`` and ``end`` any."""

    def __init__(self, library: Nccl, communicator: Communicator) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._communicator: Communicator | None = communicator
        self._given_up = threading.Event()

    @property
    def communicator(self) -> Communicator:
        """To make calls with, inside ``call``. ``TransferError`` once it has ended."""
        if (communicator := self._communicator) is None:
            raise TransferError("the channel was aborted")
        return communicator

    def call(self, make_calls: Callable[[Communicator], None], deadline: float) -> None:
        """Call into NCCL and wait until it has queued what it was told. Raises as ``wait``."""
        try:
            make_calls(self.communicator)
        except NOT_NCCLS:
            raise
        except Exception as error:
            self.stop_if_given_up()
            raise TransferError(f"NCCL: {type(error).__name__}: {error}") from error
        self.wait(self.is_ready, deadline)

    def is_ready(self) -> bool:
        """Whether NCCL has queued what it was told. ``TransferError`` when it cannot say."""
        return self._state() == SUCCESS

    def wait(self, is_met: Callable[[], bool], deadline: float) -> None:
        """Wait until a condition is met.

        Args:
            deadline: on the monotonic clock.

        Raises:
            TransferError: the link was given up, NCCL has failed, or the time is over.
        """
        pause_seconds = _SHORTEST_PAUSE_SECONDS
        while True:
            self.stop_if_given_up()
            if (state := self._state()) not in (SUCCESS, IN_PROGRESS):
                raise TransferError(f"NCCL: {self._library.get_error_string(state)}")
            if is_met():
                return
            if time.monotonic() >= deadline:
                raise TransferError("the transfer's deadline has passed")
            self._given_up.wait(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def give_up(self) -> bool:
        """Wake whoever waits; whether nobody has done so before."""
        with self._lock:
            is_first = not self._given_up.is_set()
            self._given_up.set()
        return is_first

    def end(self) -> None:
        """Abort the communicator, once. What it has on the device ends soon after."""
        with self._lock:
            communicator, self._communicator = self._communicator, None
            self._given_up.set()
        if communicator is None:
            return
        try:
            communicator.abort()
        except Exception as error:  # noqa: BLE001 - there is nothing else to end it with
            log.warning("NCCL cannot abort", error=f"{type(error).__name__}: {error}")

    def _state(self) -> int:
        try:
            return int(self.communicator.get_async_error())
        except NOT_NCCLS:
            raise
        except Exception as error:
            self.stop_if_given_up()
            raise TransferError(f"NCCL: {type(error).__name__}: {error}") from error

    def stop_if_given_up(self) -> None:
        """``TransferError`` once the link was given up."""
        if self._given_up.is_set():
            raise TransferError("the channel was aborted")


def open_link(
    library: Nccl,
    streams: SideStreams,
    *,
    num_ranks: int,
    rank: int,
    unique_id: bytes,
    max_ctas: int,
    deadline: float,
    given_up: threading.Event | None = None,
) -> Link:
    """Meet the other rank.

    Args:
        given_up: set by another thread, it ends the wait at once.

    Raises:
        TransferError: it did not come before the deadline, NCCL cannot reach it, or nobody wants
            it any more.
    """
    config = library.NCCLConfig(blocking=False, max_ctas=max_ctas)
    try:
        with streams.entered():
            name = library.UniqueId.from_bytes(unique_id)
            link = Link(library, library.Communicator.init(num_ranks, rank, name, config))
    except NOT_NCCLS:
        raise
    except Exception as error:
        message = f"NCCL did not connect: {type(error).__name__}: {error}"
        raise TransferError(message) from error

    def has_met() -> bool:
        if given_up is not None and given_up.is_set():
            raise TransferError("the channel was aborted")
        return link.is_ready()

    try:
        link.wait(has_met, deadline)
    except TransferError as error:
        link.end()
        raise TransferError(f"NCCL did not connect: {error}") from None
    except BaseException:
        link.end()
        raise
    return link
