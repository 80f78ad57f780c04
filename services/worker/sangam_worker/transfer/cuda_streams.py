"""Side streams of a CUDA device. Everything about transfers that only a GPU can run is here.

Streams have the higher priority, so that a few short copies do not queue behind a pass; torch
keeps 32 such streams a device and hands them out in turn, apart from those that the engine uses.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sangam_worker.transfer.lanes import Mark, SideStream

_PRIORITY = -1


def allow_many_streams() -> None:
    """Give streams hardware queues of their own. Before the process's first use of CUDA.

    With CUDA's 8 queues a pass could stand behind a receive that waits for its peer.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


class CudaMark:
    """An event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        """Whether it has happened."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaStream:
    """A stream."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=_PRIORITY)  # type: ignore[no-untyped-call]

    @property
    def handle(self) -> int:
        """``cudaStream_t``."""
        return self.stream.cuda_stream

    def launch(self, work: Callable[[], None]) -> None:
        """Launch kernels on it."""
        # The device first: a stream of another than the thread's would on its end make the first
        # GPU the thread's again, and so give this process a context there.
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            work()

    def mark(self) -> CudaMark:
        """Record an event."""
        return CudaMark(self.stream.record_event())

    def wait(self, mark: Mark) -> None:
        """Wait for an event, on the device."""
        assert isinstance(mark, CudaMark)
        self.stream.wait_event(mark.event)


class CudaStreams:
    """A GPU's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self) -> CudaStream:
        """Another stream."""
        return CudaStream(self._device)

    def empty(self, stream: SideStream, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory of the stream's own: the allocator orders reuse by stream."""
        assert isinstance(stream, CudaStream)
        with torch.cuda.stream(stream.stream):
            return torch.empty(shape, dtype=dtype, device=self._device)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the device current."""
        with torch.cuda.device(self._device):
            yield
