"""A GPU's memory as the start sees it: a protocol, and CUDA's answer.

Measures, decides nothing (``memory_budget``). Called by ``start``; tests have a GPU of their own.
"""

import gc
from collections.abc import Callable
from typing import Protocol

import torch

from sangam_worker.memory_budget import DeviceMemory


class Gpu(Protocol):
    """The device that an engine is about to be built on."""

    def memory(self) -> DeviceMemory:
        """The whole memory and what is in use of it, by anyone; caches are emptied first."""
        ...

    @property
    def is_hopper(self) -> bool:
        """Whether FlashInfer's FA3 kernels run on it."""
        ...

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """The most that tensors had while ``work`` ran, beyond what they had before."""
        ...


class CudaGpu:
    """``Gpu`` by torch.

    Args:
        device: usable.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def memory(self) -> DeviceMemory:
        """See ``Gpu``. Creates this process's context on the device."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(total_bytes=total_bytes, used_bytes=total_bytes - free_bytes)

    @property
    def is_hopper(self) -> bool:
        """See ``Gpu``."""
        return torch.cuda.get_device_capability(self._device)[0] == 9

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """See ``Gpu``."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before
