"""What tests of FlashInfer's path need: a module says ``pytestmark = FLASHINFER_ON_A_GPU``."""

import importlib.util
import os

import pytest
import torch

SECONDS = float(os.environ.get("GPU_TEST_SECONDS", "900"))
"""Of a test: kernels that are not there are compiled on first use. ``bench-gpu`` has them before,
and gives less, so that one that hangs costs the others little."""

FLASHINFER_ON_A_GPU = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="needs the extra gpu"
    ),
    pytest.mark.timeout(SECONDS),
    pytest.mark.filterwarnings("default"),  # of FlashInfer's and its compiler's, not ours
]
