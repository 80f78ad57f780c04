"""Greedy rows from one reading of their logits, on devices with a kernel for it.

Decides which draws the kernel serves and how its figures become confidences; on other devices,
and for all other draws, ``candidates`` computes. Called by ``sampler``; ``engine`` asks for the
kernel when it starts.
"""

from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from sangam_core.errors import ConfigurationError
from sangam_worker.extras import HOW_TO_INSTALL
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.linear import padded_rows
from sangam_worker.sampling.candidates import Draw, Measure
from sangam_worker.triton_compiler import first_use


class Column(IntEnum):
    """What the kernel says of a row."""

    TOKEN = 0
    """The best entry that is not the mask token; of equals the lowest id."""
    PROBABILITY = 1
    """The token's, of all entries: the mask token keeps its share."""
    RUNNER_UP = 2
    """The probability of the best other entry, the mask token included."""
    NEGATIVE_ENTROPY = 3
    """Of all entries. Without the 1e-10 that Dream adds inside the logarithm, which needs a second
    reading: it is worth 1e-10 an entry at most, 2e-5 for Dream's vocabulary."""


class GreedyKernel(Protocol):
    """Reads rows of logits, float32 or bfloat16; see ``greedy_kernel`` for the real one."""

    def __call__(self, logits: Tensor, mask_id: int, num_columns: int) -> Tensor:
        """The first 2 or all 4 columns of ``Column``.

        Args:
            logits: ``[rows, vocab]``, any strides.

        Returns:
            float64 ``[rows, num_columns]`` on the same device, made without waiting for it. All
            but the token are NaN for a row that has a NaN, a plus infinity or nothing else than
            minus infinities.
        """
        ...


def greedy_kernel(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> GreedyKernel | None:
    """The kernel for a device, compiled for the model's rows; None where torch's operators serve.

    Compiling takes seconds, and is kept in Triton's cache (``TRITON_CACHE_DIR``).

    Raises:
        ConfigurationError: Triton is missing, or cannot compile.
    """
    if device.type != "cuda":
        return None
    try:
        from sangam_worker.sampling.greedy_kernel import summarise
    except ImportError as error:
        raise ConfigurationError(
            f"device {str(device)!r} samples with Triton, which cannot be imported ({error}); "
            + HOW_TO_INSTALL
        ) from None
    rows = torch.zeros((padded_rows(1), config.vocab_size), dtype=dtype, device=device)
    with first_use("the sampling kernel"):
        for num_columns in {columns_of(config, measure) for measure in Measure}:
            summarise(rows, config.mask_id, num_columns)
        torch.cuda.synchronize(device)
    return summarise


def is_served(draw: Draw) -> bool:
    """Whether the kernel gives what the draw needs: no noise and no filter."""
    return draw.is_greedy and draw.top_p >= 1.0 and draw.top_k <= 0


def columns_of(config: ModelConfig, measure: Measure) -> int:
    """How many columns a measure needs. LLaDA knows no other than the probability."""
    if config.family == "llada" or measure is Measure.PROBABILITY:
        return Column.PROBABILITY + 1
    return len(Column)


def confidences_of(
    summary: Tensor, config: ModelConfig, measure: Measure, dtype: torch.dtype
) -> Tensor:
    """Confidences, float64 ``[rows]``, of rows with one measure.

    LLaDA's are taken as they are; Dream's are rounded to the model's dtype where its softmax in
    that dtype rounds, as thresholds are compared in it.
    """
    probability = summary[:, Column.PROBABILITY]
    if config.family == "llada":
        return probability
    if measure is Measure.NEGATIVE_ENTROPY:
        return summary[:, Column.NEGATIVE_ENTROPY].to(dtype).double()
    if measure is Measure.MARGIN:
        return (probability.to(dtype) - summary[:, Column.RUNNER_UP].to(dtype)).double()
    return probability.to(dtype).double()
