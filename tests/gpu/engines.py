"""The engines that are checked on a GPU, by what they compute with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.shapes import skip_without
from tests.worker.checkpoints import write_checkpoint
from tests.worker.engine_checks import MODELS, EngineKind

from sangam_worker.verify.engines import EngineNames

FUSED = {"dtype": "bfloat16", "attention": "flashinfer"}
NAMES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "flashinfer": FUSED,
    "flashinfer-fa2": FUSED | {"attention": "flashinfer-fa2"},
    "flashinfer-fa3": FUSED | {"attention": "flashinfer-fa3"},
    "graphs": FUSED | {"graph_block": 8},
    "fp8": FUSED | {"quantization": "fp8"},
    "fp8-graphs": FUSED | {"quantization": "fp8", "graph_block": 8},
}
"""What ``load_engine`` is told. Blocks of 8 are those of most golden cases."""


def a_kind(name: str) -> EngineKind:
    """An engine on the first GPU; skips what that one cannot run."""
    skip_without(name)
    if name.startswith("fp8") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that multiplies e4m3")
    names = EngineNames(device="cuda", **NAMES[name])
    return EngineKind(names.load, names.number_format)


def model_at(name: str, folder: Path) -> Path:
    """A model of ``engine_checks``, written down unless it is a golden one."""
    model = MODELS[name]
    return model if isinstance(model, Path) else write_checkpoint(folder / name, model)
