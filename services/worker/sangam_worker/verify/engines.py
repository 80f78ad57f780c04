"""Builds the engines of a check: the one under test from names, and those it is compared with.

Called by ``__main__``, tests and benchmarks.
"""

from dataclasses import dataclass
from pathlib import Path

from sangam_core.errors import ConfigurationError
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine
from sangam_worker.verify.forcing import ForcedEngine
from sangam_worker.verify.rounding import Errors, NumberFormat, number_format, perturbed_operators

NUM_PERTURBED = 4
"""Engines from which the expected error of a row is estimated. With four, the estimate of a row is
off by a factor of two now and then, which ``ROW_LIMIT`` allows for."""


@dataclass(frozen=True, slots=True)
class EngineNames:
    """An engine's number format, device and kernels, by the names of ``load_engine``."""

    dtype: str = "float32"
    device: str = "cpu"
    attention: str = "torch"
    quantization: str = "none"

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
        return load_engine(
            str(model),
            dtype=self.dtype,
            device=self.device,
            attention=self.attention,
            operators="torch" if self.attention == "torch" else "flashinfer",
            total_pages=total_pages,
        )


def forced_engine(model: Path, names: EngineNames, *, total_pages: int) -> ForcedEngine:
    """An engine by its names beside the float32 one, for ``force_cases``."""
    engine = names.load(model, total_pages)
    return beside_reference(model, engine, names.number_format)


def beside_reference(model: Path, engine: Engine, kind: NumberFormat) -> ForcedEngine:
    """Any engine of a model beside the float32 one.

    Args:
        kind: how far it may be from that one.
    """
    total_pages = engine.kv_pool.total_pages
    reference = load_engine(str(model), total_pages=total_pages)
    perturbed = [] if kind.is_exact else _perturbed(model, kind, total_pages)
    return ForcedEngine(reference, engine, perturbed)


def _perturbed(model: Path, kind: NumberFormat, total_pages: int) -> list[tuple[Engine, Errors]]:
    found = []
    for seed in range(NUM_PERTURBED):
        operators, errors = perturbed_operators(kind, seed)
        engine = load_engine(str(model), total_pages=total_pages, operators=operators)
        found.append((engine, errors))
    return found
