"""From settings to an engine that is ready: nothing is compiled or grown inside a request later.

Decides the order. On a GPU: the memory is settled from shapes, so that what cannot fit is refused
within a second; kernels that are missing are compiled; weights are read; the pool takes what is
then left; iterations of every kind run once; graphs are captured; one line says what became of the
memory. The graphs need the pool, so that what they take is estimated before the pool is made, and
held against what they took. A CPU only loads the model. Called by ``__main__`` before a port opens.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import structlog
import torch

from sangam_core.errors import ConfigurationError
from sangam_worker import flashinfer_kernels
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine, usable_device
from sangam_worker.flashinfer_library import kernel_dim, load_flashinfer
from sangam_worker.gpu import CudaGpu, Gpu
from sangam_worker.graphs.buckets import buckets_up_to
from sangam_worker.kernels import compile_missing
from sangam_worker.memory_budget import MemoryBudget, MemoryNeeds, PoolWish, settle
from sangam_worker.models.description import ModelConfig
from sangam_worker.progress import SILENT, Advance, Reports
from sangam_worker.settings import WorkerSettings
from sangam_worker.sizing import (
    FIXED_BYTES,
    activation_bytes,
    bytes_per_page,
    config_of,
    graph_bytes,
    largest_iteration,
    pages_on_cpu,
    pages_set,
    rotation_bytes,
    weight_bytes,
)
from sangam_worker.transfer.memory import provided_bytes
from sangam_worker.warm_up import WarmUps, run_all

log = structlog.get_logger(__name__)


def start_engine(settings: WorkerSettings, reports: Reports) -> Engine:
    """The worker's engine, ready to serve.

    Raises:
        ConfigurationError: one line that names what is unusable, or does not fit.
    """
    config = config_of(settings)
    if not settings.is_on_cuda:
        if settings.quantization == "fp8":
            log.warning(
                "SANGAM_QUANTIZATION fp8: answers differ from those without it, and a CPU gains "
                "nothing by it"
            )
        total_pages = pages_on_cpu(settings, config)
        return load_engine(**_named(settings), total_pages=total_pages, reports=reports)
    device = usable_device(settings.device)
    gpu = CudaGpu(device)
    start = GpuStart(settings, config, gpu, reports)
    if settings.uses_flashinfer:
        load_flashinfer(device, torch.bfloat16)
        kernels = flashinfer_kernels.wanted(
            kernel_dim(config.head_dim), kernels_of(settings.attention_backend, gpu.is_hopper)
        )
        missing = flashinfer_kernels.missing(kernels)
        compile_missing(missing, flashinfer_kernels.build, reports)
    return start.engine(load_engine)


class GpuStart:
    """One start on a GPU, whose memory is settled from shapes as this is made.

    Args:
        gpu: nothing of ours is on it yet.

    Raises:
        ConfigurationError: it does not fit.
    """

    def __init__(
        self, settings: WorkerSettings, config: ModelConfig, gpu: Gpu, reports: Reports
    ) -> None:
        self._settings, self._config, self._gpu, self._reports = settings, config, gpu, reports
        self._buckets = buckets_of(settings)
        self._before = gpu.memory()
        self._wish = PoolWish(
            page_bytes=bytes_per_page(config, settings.number_format),
            total_pages=pages_set(settings, config),
            longest_tokens=config.max_sequence_tokens,
        )
        self._budget = self._settled(needs_of(settings, config))

    def engine(self, load: Callable[..., Engine]) -> Engine:
        """Build the engine and get it ready; one line says what became of the memory.

        Args:
            load: ``load_engine``.

        Raises:
            ConfigurationError: it does not fit after all.
        """
        try:
            engine = load(
                **_named(self._settings),
                total_pages=self._decide_pages,
                graph_buckets=self._buckets,
                graph_block_tokens=self._settings.block_length,
                reports=self._reports,
            )
            taken = self._make_ready(engine)
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
            raise ConfigurationError(
                f"the GPU's memory ran out while the worker started ({reason}); lower "
                "SANGAM_GPU_MEMORY_UTILIZATION, which leaves more to what is not counted"
            ) from error
        self._say(taken)
        return engine

    def _settled(self, needs: MemoryNeeds) -> MemoryBudget:
        return settle(self._before, needs, self._wish, self._settings.gpu_memory_utilization)

    def _decide_pages(self) -> int:
        """Asked for when the weights are where they are, with what came along."""
        weights_bytes = self._gpu.memory().used_bytes - self._before.used_bytes
        self._budget = self._settled(replace(self._budget.needs, weights_bytes=weights_bytes))
        return self._budget.total_pages

    def _make_ready(self, engine: Engine) -> MemoryNeeds:
        """Run iterations of every kind and capture the graphs; what was really taken."""
        settings = self._settings
        warm_ups = WarmUps(self._config, settings.block_length, engine.kv_pool.total_pages)
        largest = [warm_ups.largest(largest_iteration(settings, self._config))]
        run_all(engine, warm_ups.of_every_kind(), self._reports)
        peak = self._gpu.peak_bytes(lambda: run_all(engine, largest, self._reports))
        graphs_bytes = 0
        if self._buckets:
            with self._reports.task("graphs captured", len(self._buckets), "sizes") as advance:
                graphs_bytes = engine.capture_graphs(
                    _following(advance), is_measured=settings.measure_kernels
                )
            if settings.measure_kernels:
                log.info("fastest in graphs, by blocks", chosen=engine.graph_choices)
            # Capturing gives back whatever torch keeps; no request is to wait until the device has
            # memory for it again, nor find out that graphs and the largest iteration do not fit.
            run_all(engine, largest, SILENT)
        activations_bytes = peak + rotation_bytes(self._config) + FIXED_BYTES
        return replace(
            self._budget.needs, activations_bytes=activations_bytes, graphs_bytes=graphs_bytes
        )

    def _say(self, taken: MemoryNeeds) -> None:
        """One line; another where more was taken than estimated."""
        estimated, budget = self._budget.needs, self._budget.taking(taken)
        log.info(budget.line(), total_pages=budget.total_pages)
        if taken.total_bytes > estimated.total_bytes:
            log.warning(
                "the start took more GPU memory than estimated, of what was to stay free",
                estimated=_in_gigabytes(estimated),
                taken=_in_gigabytes(taken),
            )
        if budget.left_bytes < 0:
            raise ConfigurationError(
                f"{budget.line()}: nothing is left for transfers of KV; lower "
                "SANGAM_GPU_MEMORY_UTILIZATION"
            )


def needs_of(settings: WorkerSettings, config: ModelConfig) -> MemoryNeeds:
    """What a worker takes beside its pool, from shapes alone."""
    number_format = settings.number_format
    return MemoryNeeds(
        weights_bytes=weight_bytes(config, number_format, is_fp8=settings.quantization == "fp8"),
        activations_bytes=activation_bytes(
            config, largest_iteration(settings, config), number_format
        ),
        graphs_bytes=graph_bytes(
            config, buckets_of(settings), settings.block_length, number_format
        ),
        transfers_bytes=provided_bytes(settings.nccl_max_pairs) if settings.uses_nccl else 0,
    )


def buckets_of(settings: WorkerSettings) -> tuple[int, ...]:
    """Numbers of blocks for which graphs are captured; none without FlashInfer."""
    if not (settings.cuda_graphs and settings.uses_flashinfer):
        return ()
    return buckets_up_to(settings.max_batch_blocks)


def kernels_of(attention_backend: str, is_hopper: bool) -> tuple[str, ...]:
    """FlashInfer's attention kernels that a backend may choose."""
    if attention_backend == "flashinfer":
        return ("fa2", "fa3") if is_hopper else ("fa2",)
    return (attention_backend.removeprefix("flashinfer-"),)


def _named(settings: WorkerSettings) -> dict[str, Any]:
    """The settings as ``load_engine`` takes them."""
    return {
        "model": settings.model,
        "dtype": settings.number_format,
        "device": settings.device,
        "attention": settings.attention_backend,
        "operators": "flashinfer" if settings.uses_flashinfer else "torch",
        "quantization": settings.quantization,
        "max_sequence_tokens": settings.max_sequence_tokens,
    }


def _following(advance: Advance) -> Callable[[int, int], None]:
    """What takes how many are done, for what takes how many more."""
    seen = 0

    def progress(done: int, total: int) -> None:
        nonlocal seen
        advance(done - seen)
        seen = done

    return progress


def _in_gigabytes(needs: MemoryNeeds) -> dict[str, float]:
    return {
        name.removesuffix("_bytes"): round(number / 1e9, 2)
        for name, number in asdict(needs).items()
    }
