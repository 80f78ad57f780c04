"""Host arrays on their way to the device, without waiting for what the device is doing.

A plain copy of pageable memory would wait. Called by whoever prepares an iteration: ``engine``,
``graphs``, the attention backend, ``sampler``.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device. The host's may be thrown away at once, but not written to."""
    if device.type == "cuda" and len(tensor):
        tensor = tensor.pin_memory()  # from torch's cache of pinned memory, a copy of its own
    return tensor.to(device, non_blocking=True)


def sent_together(
    arrays: Sequence[npt.NDArray[np.int32 | np.int64]],
    dtype: type[np.int32 | np.int64],
    device: torch.device,
) -> tuple[Tensor, ...]:
    """One-dimensional arrays on the device as one type, in one copy."""
    together = np.concatenate(arrays, dtype=dtype, casting="same_kind")
    on_device = sent(torch.from_numpy(together), device)
    bounds = accumulate((len(array) for array in arrays), initial=0)
    return tuple(on_device[start:stop] for start, stop in pairwise(bounds))
