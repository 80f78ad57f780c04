"""What tests of FlashInfer's path need: a module says ``pytestmark = FLASHINFER_ON_A_GPU``."""

import importlib.util

import pytest
import torch

FLASHINFER_ON_A_GPU = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="needs the extra gpu"
    ),
    pytest.mark.timeout(900),  # kernels are compiled on first use
    pytest.mark.filterwarnings("default"),  # of FlashInfer's and its compiler's, not ours
]
