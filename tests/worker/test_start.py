"""A start on a GPU, with a stand-in for it: the order, the pages, and what is said."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import structlog
import torch
from structlog.testing import capture_logs
from tests.worker.checkpoints import LLADA
from tests.worker.harness import a_settings

from sangam_core.errors import ConfigurationError
from sangam_worker.engine_loading import load_engine
from sangam_worker.memory_budget import DeviceMemory, MemoryNeeds
from sangam_worker.models.random_models import random_config
from sangam_worker.plan import Outcome, Plan
from sangam_worker.progress import SILENT
from sangam_worker.settings import WorkerSettings
from sangam_worker.sizing import FIXED_BYTES, bytes_per_page, config_of, rotation_bytes
from sangam_worker.start import GpuStart, buckets_of, kernels_of, needs_of, start_engine
from sangam_worker.warm_up import WarmUps

GB = 10**9
LLADA_8B = random_config("random:llada-8b")
PAGE_BYTES = bytes_per_page(LLADA_8B, "bfloat16")


def gpu_settings(**changes: Any) -> WorkerSettings:
    return a_settings(**{"device": "cuda:0", "model": "random:llada-8b"} | changes)


class FakeGpu:
    """A GPU of some size, on which weights take what they are said to take."""

    is_hopper = True

    def __init__(
        self, total: int = 141 * GB, used: int = GB // 2, weights: int = 16 * GB, peak: int = GB
    ) -> None:
        self.total, self.used, self.weights, self.peak = total, used, weights, peak
        self.is_loaded = False
        self.events: list[str] = []

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.total, self.used + (self.weights if self.is_loaded else 0))

    def peak_bytes(self, work: Callable[[], None]) -> int:
        self.events.append("largest")
        work()
        return self.peak


class FakeEngine:
    """Runs nothing, and captures graphs of some size."""

    graph_choices: ClassVar = {1: {"attention": "fa3", "64x96": "torch"}}

    def __init__(self, gpu: FakeGpu, total_pages: int, graph_bytes: int) -> None:
        self._gpu, self._graph_bytes = gpu, graph_bytes
        self.kv_pool = SimpleNamespace(total_pages=total_pages)

    def execute(self, plan: Plan) -> Outcome:
        self._gpu.events.append("pass")
        return Outcome(plan.iteration, ())

    def capture_graphs(self, progress: Callable[[int, int], None], *, is_measured: bool) -> int:
        self.is_measured = is_measured
        self._gpu.events.append("graphs")
        progress(1, 2)
        progress(2, 2)
        return self._graph_bytes


def load_onto(gpu: FakeGpu, *, graph_bytes: int = GB) -> Callable[..., Any]:
    """Stands for ``load_engine``: weights first, then the pool is decided."""

    def load(**options: Any) -> FakeEngine:
        gpu.events.append("weights")
        gpu.is_loaded = True
        return FakeEngine(gpu, options["total_pages"](), graph_bytes)

    return load


def started(
    gpu: FakeGpu, settings: WorkerSettings | None = None, *, graph_bytes: int = GB
) -> FakeEngine:
    settings = settings or gpu_settings()
    start = GpuStart(settings, config_of(settings), gpu, SILENT)
    engine: Any = start.engine(load_onto(gpu, graph_bytes=graph_bytes))
    return engine  # type: ignore[no-any-return]


@pytest.fixture
def said() -> Iterator[list[Any]]:
    structlog.reset_defaults()
    with capture_logs() as entries:
        yield entries


def test_weights_come_first_then_passes_then_graphs() -> None:
    gpu = FakeGpu()
    started(gpu)
    passes = ["pass"] * len(WarmUps(LLADA_8B, 32, 1000).of_every_kind())
    assert gpu.events == ["weights", *passes, "largest", "pass", "graphs", "pass"]


def test_the_pool_takes_what_measured_weights_and_estimates_leave() -> None:
    settings, gpu = gpu_settings(), FakeGpu(weights=17 * GB)
    engine = started(gpu, settings)
    needs = needs_of(settings, LLADA_8B)
    rest = int(0.9 * gpu.total) - gpu.used - 17 * GB - needs.total_bytes + needs.weights_bytes
    assert engine.kv_pool.total_pages == rest // PAGE_BYTES


@pytest.mark.parametrize("is_measured", [True, False])
def test_kernels_are_measured_unless_they_are_not_to_be(is_measured: bool) -> None:
    engine: Any = started(FakeGpu(), gpu_settings(measure_kernels=is_measured))
    assert engine.is_measured is is_measured


def test_a_pool_that_is_set_stays_as_it_is() -> None:
    assert started(FakeGpu(), gpu_settings(total_pages=77)).kv_pool.total_pages == 77


def test_lines_say_what_was_fastest_and_where_the_memory_went(said: list[Any]) -> None:
    engine = started(FakeGpu(weights=16 * GB, peak=2 * GB), graph_bytes=GB)
    fastest, entry = said
    assert fastest["chosen"] == FakeEngine.graph_choices
    assert entry["event"].startswith("GPU memory 141.0 GB: in use before 0.5, weights 16.0, ")
    grown_once = FIXED_BYTES + rotation_bytes(LLADA_8B)
    assert f"activations {(2 * GB + grown_once) / GB:.1f}, " in entry["event"]
    assert f"({engine.kv_pool.total_pages:,} pages" in entry["event"]
    assert (entry["log_level"], entry["total_pages"]) == ("info", engine.kv_pool.total_pages)


def test_graphs_that_took_more_than_estimated_are_warned_of(said: list[Any]) -> None:
    started(FakeGpu(peak=5 * GB), graph_bytes=5 * GB)
    _, line, warning = said
    assert "graphs 5.0" in line["event"]
    assert warning["log_level"] == "warning"
    assert warning["taken"]["graphs"] == 5.0
    assert warning["estimated"]["graphs"] < 2


def test_a_start_that_leaves_nothing_for_transfers_fails_with_the_fix() -> None:
    with pytest.raises(ConfigurationError, match="lower SANGAM_GPU_MEMORY_UTILIZATION"):
        started(FakeGpu(), gpu_settings(gpu_memory_utilization=1.0), graph_bytes=30 * GB)


def test_what_cannot_fit_is_refused_before_anything_is_read() -> None:
    gpu = FakeGpu(total=20 * GB)
    settings = gpu_settings()
    with pytest.raises(ConfigurationError, match="SANGAM_GPU_MEMORY_UTILIZATION"):
        GpuStart(settings, config_of(settings), gpu, SILENT)
    assert gpu.events == []


def test_weights_that_are_larger_than_thought_are_refused_before_the_pool_is_made() -> None:
    with pytest.raises(ConfigurationError, match="SANGAM_GPU_MEMORY_UTILIZATION"):
        started(FakeGpu(total=40 * GB, weights=37 * GB))


def test_memory_that_runs_out_on_the_way_is_a_line_with_the_fix() -> None:
    def load(**options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    settings = gpu_settings()
    start = GpuStart(settings, config_of(settings), FakeGpu(), SILENT)
    with pytest.raises(ConfigurationError) as refused:
        start.engine(load)
    assert "Tried to allocate" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_graphs_none_are_captured_or_provided_for() -> None:
    settings, gpu = gpu_settings(cuda_graphs=False), FakeGpu()
    started(gpu, settings)
    assert "graphs" not in gpu.events
    assert needs_of(settings, LLADA_8B).graphs_bytes == 0
    assert buckets_of(gpu_settings(attention="torch")) == ()


def test_graphs_go_up_to_the_largest_batch() -> None:
    assert buckets_of(gpu_settings())[-1] == 64
    assert buckets_of(gpu_settings(max_batch_blocks=6)) == (1, 2, 4, 6)


def test_transfers_are_provided_for_where_they_are_nccl_s() -> None:
    assert needs_of(gpu_settings(), LLADA_8B).transfers_bytes > 0
    assert needs_of(gpu_settings(kv_transport="gloo"), LLADA_8B).transfers_bytes == 0


def test_fp8_weights_are_half_as_large() -> None:
    plain, fp8 = (
        needs_of(gpu_settings(quantization=kind), LLADA_8B).weights_bytes
        for kind in ("none", "fp8")
    )
    assert 0.5 < fp8 / plain < 0.6


@pytest.mark.parametrize(
    ("backend", "is_hopper", "kernels"),
    [
        ("flashinfer", True, ("fa2", "fa3")),
        ("flashinfer", False, ("fa2",)),
        ("flashinfer-fa2", True, ("fa2",)),
        ("flashinfer-fa3", True, ("fa3",)),
    ],
)
def test_only_kernels_that_may_be_chosen_are_compiled(
    backend: str, is_hopper: bool, kernels: tuple[str, ...]
) -> None:
    assert kernels_of(backend, is_hopper) == kernels


def test_a_real_engine_is_loaded_warmed_up_and_sized_the_same_way(said: list[Any]) -> None:
    settings = gpu_settings(
        model=str(LLADA), cuda_graphs=False, max_batch_blocks=4, block_length=8
    ).model_copy(update={"tau_tokens_prefill": 64, "dtype": "float32", "kv_transport": "gloo"})
    config = config_of(settings)
    needs = needs_of(settings, config)
    page_bytes = bytes_per_page(config, "float32")
    total = int((needs.activations_bytes + 60 * page_bytes) / 0.9) + GB // 100
    gpu = FakeGpu(total=total, used=0, weights=0, peak=0)
    on_cpu = {"device": "cpu", "attention": "torch", "operators": "torch"}
    load = partial(_overridden, on_cpu)
    engine = GpuStart(settings, config, gpu, SILENT).engine(load)
    assert 60 <= engine.kv_pool.total_pages < 10000
    assert gpu.events == ["largest"]
    assert said[-1]["total_pages"] == engine.kv_pool.total_pages


def _overridden(changes: dict[str, Any], **options: Any) -> Any:
    return load_engine(**(options | changes))


def test_a_cpu_worker_gets_the_pages_that_are_set_and_no_line_on_memory(said: list[Any]) -> None:
    engine = start_engine(a_settings(model=str(LLADA), total_pages=9), SILENT)
    assert engine.kv_pool.total_pages == 9
    assert said == []


def test_fp8_on_a_cpu_is_warned_of_in_one_line(said: list[Any]) -> None:
    start_engine(a_settings(model=str(LLADA), total_pages=9, quantization="fp8"), SILENT)
    (entry,) = said
    assert entry["log_level"] == "warning"
    assert "a CPU gains nothing by it" in entry["event"]


@pytest.mark.parametrize("model", ["/nope", "random:llada-9b"])
def test_a_model_that_there_is_not_is_refused_by_its_variable_s_name(model: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^SANGAM_MODEL: model {model}: "):
        start_engine(a_settings(model=model), SILENT)


def test_the_numbers_of_needs_are_told_by_name() -> None:
    needs = MemoryNeeds(weights_bytes=1, activations_bytes=2, graphs_bytes=3, transfers_bytes=4)
    assert needs.total_bytes == 10
