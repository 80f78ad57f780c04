"""How many KV pages fit on a GPU beside weights, activations and logits.

Decides the sum; sizes are the model's (``shapes``), shares the system's (``constants``). Called by
the simulator.
"""

from pathlib import Path

from sangam_core.errors import ConfigurationError
from sangam_core.geometry import PAGE_TOKENS
from sangam_loadtest.costs.constants import SystemConstants
from sangam_loadtest.costs.operators import BF16, FP8
from sangam_loadtest.costs.shapes import ModelShape, shape_of
from sangam_loadtest.costs.table import read_table


def pool_pages(
    gpu: str,
    model: str,
    system: str = "sangam",
    quantization: str = BF16,
    constants: Path | None = None,
    *,
    pass_rows: int | None = None,
) -> int:
    """Pages of 16 tokens that a worker of ``system`` has on ``gpu``.

    Args:
        pass_rows: packed rows of the largest pass; the system's constant by default.

    Raises:
        ConfigurationError: a name is not in the table, or not even one page fits.
    """
    table, shape = read_table(constants), shape_of(model)
    system_constants = table.systems[system]
    rows = system_constants.pass_rows if pass_rows is None else pass_rows
    left = table.gpus[gpu].memory_bytes * system_constants.memory_fraction
    left -= _weight_bytes(shape, quantization)
    left -= activation_bytes(shape, rows) + _logit_bytes(shape, system_constants, rows)
    pages = int(left // (PAGE_TOKENS * shape.kv_bytes_per_token))
    if pages < 1:
        raise ConfigurationError(
            f"{model} with passes of {rows:.0f} rows leaves no memory for KV pages on {gpu}"
        )
    return pages


def activation_bytes(shape: ModelShape, rows: float) -> float:
    """Bytes that a pass of ``rows`` rows holds at once: residual, norm, queries to values, MLP."""
    numbers = 3 * shape.hidden_size + 2 * shape.query_size + shape.key_value_size
    return rows * shape.number_bytes * (numbers + 3 * shape.intermediate_size)


def _weight_bytes(shape: ModelShape, quantization: str) -> float:
    saved = shape.num_layers * shape.layer_weights * (shape.number_bytes - 1)
    return shape.weight_bytes - (saved if quantization == FP8 else 0)


def _logit_bytes(shape: ModelShape, system: SystemConstants, pass_rows: float) -> float:
    rows = pass_rows if system.head_rows == "every_row" else min(pass_rows, system.logit_rows)
    return rows * shape.vocab_size * system.logit_bytes
