"""A worker whose engine is on a real GPU, in this process, asked over its API."""

import pytest
from tests.gpu.engines import a_kind
from tests.gpu.marks import FLASHINFER_ON_A_GPU
from tests.worker.serving_checks import check_a_worker_serves

pytestmark = FLASHINFER_ON_A_GPU


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("name", ["float32", "flashinfer", "graphs", "fp8-graphs"])
async def test_a_worker_serves_what_its_engine_gives(name: str, family: str) -> None:
    await check_a_worker_serves(a_kind(name), family)
