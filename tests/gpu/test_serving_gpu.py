"""A worker whose engine is on a real GPU, in this process, asked over its API."""

import importlib.util

import pytest
import torch
from tests.gpu.engines import a_kind
from tests.worker.serving_checks import check_a_worker_serves

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="needs the extra gpu"
    ),
    pytest.mark.timeout(900),  # kernels are compiled on first use
    pytest.mark.filterwarnings("default"),  # of FlashInfer's and its compiler's, not ours
]


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("name", ["float32", "flashinfer", "graphs", "fp8-graphs"])
async def test_a_worker_serves_what_its_engine_gives(name: str, family: str) -> None:
    await check_a_worker_serves(a_kind(name), family)
