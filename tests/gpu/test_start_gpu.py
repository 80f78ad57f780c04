"""A worker's start on a GPU: memory is taken as estimated, and the engine is ready when it returns.

The first run on a machine compiles FlashInfer's kernels, which takes minutes.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from pydantic import SecretStr
from structlog.testing import capture_logs
from tests.gpu.marks import SECONDS
from tests.worker.test_weights_memory import read_apart, written

from sangam_core.errors import ConfigurationError
from sangam_worker.gpu import CudaGpu
from sangam_worker.progress import SILENT
from sangam_worker.settings import WorkerSettings
from sangam_worker.sizing import config_of, largest_iteration
from sangam_worker.start import GpuStart, needs_of, start_engine
from sangam_worker.warm_up import WarmUps

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.timeout(SECONDS),
]

DEVICE = torch.device("cuda:0")


def gpu_settings(**changes: Any) -> WorkerSettings:
    return WorkerSettings(internal_token=SecretStr("t"), device="cuda:0", **changes)


SHAPES: dict[str, dict[str, Any]] = {
    "random:llada-8b": {},
    # Measuring takes half a minute or so, and memory that one model shows.
    "random:dream-7b": {"max_sequence_tokens": 4096, "measure_kernels": False},
}


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def said() -> Iterator[list[Any]]:
    structlog.reset_defaults()
    with capture_logs() as entries:
        yield entries


@pytest.mark.parametrize("model", SHAPES)
def test_a_start_takes_no_more_than_it_estimated(model: str, said: list[Any]) -> None:
    settings = gpu_settings(
        model=model, gpu_memory_utilization=0.6, kv_transport="gloo", **SHAPES[model]
    )
    engine = start_engine(settings, SILENT)
    line = next(each for each in said if each["event"].startswith("GPU memory"))
    warned = [each for each in said if each["log_level"] == "warning"]
    # An algorithm of cuBLASLt's that cannot run costs nothing.
    assert [each for each in warned if not each["event"].startswith("algorithm")] == [], line
    share = 0.6 * CudaGpu(DEVICE).memory().total_bytes
    assert CudaGpu(DEVICE).memory().used_bytes <= share, line
    # Once more: nothing has to grow for what was warmed up.
    reserved = torch.cuda.memory_reserved(DEVICE)
    config = config_of(settings)
    largest = WarmUps(config, settings.block_length, engine.kv_pool.total_pages).largest(
        largest_iteration(settings, config)
    )
    engine.execute(largest.plan)
    estimated = needs_of(settings, config).activations_bytes
    assert torch.cuda.memory_reserved(DEVICE) - reserved <= estimated


def test_what_cannot_fit_is_refused_before_weights_are_made() -> None:
    settings = gpu_settings(model="random:llada-8b", gpu_memory_utilization=0.05)
    before = torch.cuda.memory_allocated(DEVICE)
    with pytest.raises(ConfigurationError, match="SANGAM_GPU_MEMORY_UTILIZATION"):
        GpuStart(settings, config_of(settings), CudaGpu(DEVICE), SILENT)
    assert torch.cuda.memory_allocated(DEVICE) == before


def test_weights_reach_the_gpu_with_less_than_two_shards_on_the_host(tmp_path: Path) -> None:
    largest = written(tmp_path)
    measured = read_apart(tmp_path, "cuda:0")
    assert measured["peak"] < 2 * largest, f"{measured['peak'] / largest:.2f} shards"
