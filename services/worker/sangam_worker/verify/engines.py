"""Builds the engines of a check: the one under test from names, and those it is compared with.

Called by ``__main__``, tests and benchmarks.
"""

from dataclasses import dataclass
from pathlib import Path

from sangam_core.errors import ConfigurationError
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine
from sangam_worker.graphs.buckets import BLOCK_TOKENS
from sangam_worker.verify.forcing import ForcedEngine
from sangam_worker.verify.reference import Reference
from sangam_worker.verify.rounding import NumberFormat, number_format

_GRAPH_BUCKETS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class EngineNames:
    """An engine's number format, device and kernels, by the names of ``load_engine``."""

    dtype: str = "float32"
    device: str = "cpu"
    attention: str = "torch"
    quantization: str = "none"
    graph_block: int = 0
    """Length of the blocks whose passes come from CUDA graphs; 0 for none."""

    def __str__(self) -> str:
        parts = [self.dtype, f"on {self.device}", f"with {self.attention}"]
        return " ".join(parts + [self.quantization] * (self.quantization != "none"))

    @property
    def number_format(self) -> NumberFormat:
        """How far it may be from float32."""
        return number_format(
            dtype=self.dtype,
            device=self.device,
            attention=self.attention,
            quantization=self.quantization,
        )

    def load(self, model: Path, total_pages: int) -> Engine:
        """Build it.

        Raises:
            ConfigurationError: no such model, or a name that cannot be used.
        """
        if not model.is_dir():
            raise ConfigurationError(f"{model}: there is no such folder")
        engine = load_engine(
            str(model),
            dtype=self.dtype,
            device=self.device,
            attention=self.attention,
            operators="torch" if self.attention == "torch" else "flashinfer",
            quantization=self.quantization,
            total_pages=total_pages,
            graph_buckets=_GRAPH_BUCKETS if self.graph_block else (),
            graph_block_tokens=self.graph_block or BLOCK_TOKENS,
        )
        # Not measured: two engines of the same names are to give the same bits.
        engine.capture_graphs(is_measured=False)
        return engine


def forced_engine(model: Path, names: EngineNames, *, total_pages: int) -> ForcedEngine:
    """An engine by its names beside the float32 one, for ``force_cases``."""
    engine = names.load(model, total_pages)
    return ForcedEngine(Reference(model, names.number_format, total_pages), engine)
