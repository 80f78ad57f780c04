"""Attention's shapes on a GPU, and which of FlashInfer's kernels it has."""

from functools import cache

import pytest
import torch

SHAPES = {"llada-8b": (32, 32, 128), "dream-7b": (28, 4, 128), "64": (6, 2, 64), "tiny": (4, 2, 16)}
"""Heads, those of K and V, and their size. Words that ``bench-gpu`` looks for: 8b, 7b, 128."""

KERNELS = ["fa2", "fa3"]


@cache
def has_fa3() -> bool:
    """FA3 is for Hopper alone."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def skip_without(kernel: str) -> None:
    """Skip a test of a kernel, or of a backend that is named by it, which this GPU has not."""
    if kernel.endswith("fa3") and not has_fa3():
        pytest.skip("this GPU has no fa3")
