"""The one copy from device to host of an iteration.

Decides where it lands: in pinned memory, so that nobody waits until the figures are asked for.
Called by ``sampler``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """Figures on their way to the host.

    Attributes:
        arrived: recorded behind the copy; ``None`` where the figures were on the host anyway.
    """

    figures: Tensor
    arrived: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """The figures, on the host. To be read before the next copy starts."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.figures


class Readback:
    """Copies float64 figures, one iteration's at a time, into memory that it keeps."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.float64)

    def start(self, figures: Tensor) -> Copied:
        """Begin to copy ``[rows, columns]`` behind everything that the device has to do."""
        if figures.device.type == "cpu":
            return Copied(figures, None)
        if figures.numel() > len(self._pinned):
            # By far more than asked for: pinning memory stops the device.
            num_figures = max(2 * figures.numel(), 2**16)
            self._pinned = torch.empty(num_figures, dtype=torch.float64, pin_memory=True)
        on_host = self._pinned[: figures.numel()].view(figures.shape)
        on_host.copy_(figures, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return Copied(on_host, arrived)
