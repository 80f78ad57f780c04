"""Builds the engines that are measured, one at a time: two would not fit beside their pools.

Decides what "by graph" and "eagerly" mean in the loader's terms. Called by the commands' parts.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.passes import Timed
from benchmarks.iterations import SkippableAttention
from sangam_loadtest.costs.shapes import ModelShape, shape_from
from sangam_worker.attention.protocol import Attention
from sangam_worker.engine_loading import ATTENTION_BACKENDS, DTYPES, load_engine
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.config import model_config
from sangam_worker.models.random_models import RANDOM_PREFIX


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how models run.

    Attributes:
        attention, operators: as the engine's loader names them.
    """

    device: str
    dtype: str
    attention: str
    operators: str

    @property
    def torch_device(self) -> torch.device:
        """The device."""
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The number format."""
        return DTYPES[self.dtype]

    def shape(self, model: str) -> ModelShape:
        """Sizes for the floor, in the number format at hand."""
        return shape_from(model_config(model), self.torch_dtype.itemsize)


def name_of(model: str) -> str:
    """What results call a model."""
    return model.removeprefix(RANDOM_PREFIX).rstrip("/").rpartition("/")[2]


def _kind_of(place: Place) -> str:
    """What attends outside graphs, by which lines are called."""
    return place.attention.removeprefix("flashinfer-").removesuffix("-blocks")


class RunsAgain:
    """Stands for CUDA graphs on a CPU: what would be replayed runs once more."""

    taken_bytes = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Take what ``run`` does."""
        run()
        return run

    def seconds(self, replay: Callable[[], None]) -> float:
        """Nobody asks: there is one kernel on a CPU."""
        began = time.perf_counter()
        replay()
        return time.perf_counter() - began


def load_graphs(
    place: Place,
    model: str,
    total_pages: int | Callable[[], int],
    buckets: Sequence[int],
    quantization: str = "none",
) -> Timed:
    """An engine that has its decode passes of so many blocks as graphs.

    What the one before held is given back first, if nobody holds that any more.
    """
    free_memory(place.torch_device)
    engine = load_engine(
        model,
        dtype=place.dtype,
        device=place.device,
        total_pages=total_pages,
        attention=place.attention,
        operators=place.operators,
        quantization=quantization,
        graph_buckets=buckets,
    )
    engine.capture_graphs(capture=RunsAgain() if place.torch_device.type == "cpu" else None)
    _fill(engine.kv_pool)  # trials of kernels leave zeros
    kind = _kind_of(place)
    is_fp8 = quantization == "fp8"
    return Timed(engine, place.shape(model), name_of(model), kind, "graph", is_fp8)


def load_eager(place: Place, model: str, total_pages: int) -> Timed:
    """An engine that issues every pass kernel by kernel, and can leave its attention out.

    Gives memory back first as ``load_graphs`` does.
    """
    free_memory(place.torch_device)
    skippable: list[SkippableAttention] = []

    def make_skippable(pool: KVPool, num_heads: int) -> Attention:
        skippable.append(SkippableAttention(ATTENTION_BACKENDS[place.attention](pool, num_heads)))
        return skippable[0]

    engine = load_engine(
        model,
        dtype=place.dtype,
        device=place.device,
        total_pages=total_pages,
        attention=make_skippable,
        operators=place.operators,
    )
    _fill(engine.kv_pool)
    return Timed(
        engine=engine,
        shape=place.shape(model),
        name=name_of(model),
        kind=_kind_of(place),
        launch="eager",
        skippable=skippable[0],
    )


def _fill(pool: KVPool) -> None:
    """Random keys and values: a device multiplies zeros faster than what it is for."""
    for layer in pool.layers:
        layer.normal_()


def free_memory(device: torch.device) -> None:
    """Give back what dropped models held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
