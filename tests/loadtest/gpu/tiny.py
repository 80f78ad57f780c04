"""Sizes and places that make the GPU benchmarks run on a CPU in seconds."""

from pathlib import Path

MODELS = Path(__file__).parents[2] / "golden" / "models"
LLADA, DREAM = str(MODELS / "llada-tiny-a"), str(MODELS / "dream-tiny-a")

ON_CPU = [
    "--device", "cpu", "--dtype", "float32", "--attention", "torch", "--operators", "torch",
    "--patience", "20", "--seconds", "2000",
]  # fmt: skip
