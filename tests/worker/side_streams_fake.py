"""Side streams without a device: a thread each, that does what is queued, in order, later.

As on a GPU nothing has happened when a call returns, so that a slot used again too early, or a
mark taken too soon, shows as wrong numbers.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from sangam_worker.transfer.lanes import Mark, SideStream

_WAIT_SECONDS = 60.0
_thread = threading.local()
_handles = itertools.count(1)
_streams: dict[int, "FakeStream"] = {}


class FakeMark:
    def __init__(self, stream: "FakeStream") -> None:
        self.stream = stream
        self.passed = threading.Event()

    def is_done(self) -> bool:
        if self.stream.failure is not None:
            raise RuntimeError(f"the device has failed: {self.stream.failure}")
        return self.passed.is_set()


class FakeStream:
    """Attributes:
    jitter_seconds: each piece of work begins up to this much late.
    gate: cleared, nothing goes on.
    failure: what went wrong in the work, as a device would remember it.
    is_nccls: a call of NCCL's is in progress on it, so that nothing else may be queued.
    is_closed: it does nothing more.
    """

    def __init__(self, device: "FakeStreams | None" = None, jitter_seconds: float = 0.0) -> None:
        self.device = device
        self.is_nccls = self.is_closed = False
        self.handle = next(_handles)
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self._random = random.Random(self.handle)
        self.jitter_seconds = jitter_seconds
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        _streams[self.handle] = self
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, work: Callable[[], None]) -> None:
        assert not self.is_nccls, "NCCL has not queued what it was told to queue on this stream"
        self._work.put(work)

    def mark(self) -> FakeMark:
        mark = FakeMark(self)
        self.launch(mark.passed.set)
        return mark

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, FakeMark)
        self.launch(lambda: _assert(mark.passed.wait(_WAIT_SECONDS)))

    def close(self) -> None:
        self.is_closed = True
        self._work.put(None)
        _streams.pop(self.handle, None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(self._random.random() * self.jitter_seconds)
            _assert(self.gate.wait(_WAIT_SECONDS))
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the device's, told by its marks
                self.failure = error


class FakeStreams:
    """A device; ``made`` are its streams, in order."""

    def __init__(self, jitter_seconds: float = 0.0) -> None:
        self.made: list[FakeStream] = []
        self.is_out_of_memory = False
        self._jitter_seconds = jitter_seconds

    def new(self) -> FakeStream:
        self.made.append(FakeStream(self, self._jitter_seconds))
        return self.made[-1]

    def empty(self, stream: SideStream, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        if self.is_out_of_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(shape, dtype=dtype)

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, _thread.device = current_device(), self
        try:
            yield
        finally:
            _thread.device = before

    def close(self) -> None:
        for stream in self.made:
            stream.close()


def current_device() -> FakeStreams | None:
    """The calling thread's; a GPU's thread that named none would open the first GPU."""
    return getattr(_thread, "device", None)


def stream_of(handle: int) -> FakeStream:
    """The stream that a handle names."""
    return _streams[handle]


def _assert(is_met: bool) -> None:
    assert is_met, "a test closed a gate and forgot it, or nothing ever passes a mark"
