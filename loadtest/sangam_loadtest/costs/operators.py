"""Seconds of each operator on the device: products, attention, small kernels, head, sampling.

Decides the roofline terms; which rows go where is ``model``'s. Every term is a time at the
device's ceilings (``gpus``) times a factor (``constants``). Coefficients are worked out once, so
that a pass costs a microsecond to price. Called by ``model`` and ``fit``.
"""

from dataclasses import dataclass

from sangam_core.geometry import DEFAULT_BLOCK_LENGTH
from sangam_loadtest.costs.batch import PassBatch
from sangam_loadtest.costs.constants import (
    AttentionConstants,
    ProductConstants,
    SamplingConstants,
    SmallConstants,
)
from sangam_loadtest.costs.gpus import Gpu
from sangam_loadtest.costs.shapes import ModelShape

BLOCK_ROWS = DEFAULT_BLOCK_LENGTH
"""Rows of a block, where a batch does not say them."""

FP8 = "fp8"
BF16 = "bf16"
"""Products as the model is served, unquantised; on a CPU that is float32."""


class Roofline:
    """A product over some weights: p-norm of the time for the bytes and for the FLOPs.

    The p-norm is between the larger of the two (p large: they overlap) and their sum (p = 1).
    """

    __slots__ = ("_bytes_seconds", "_power", "_root", "_row_seconds")

    def __init__(
        self, bytes_seconds: float, row_seconds: float, constants: ProductConstants
    ) -> None:
        power = constants.sharpness
        self._bytes_seconds = (bytes_seconds * constants.bytes_factor) ** power
        self._row_seconds = row_seconds * constants.flops_factor
        self._power = power
        self._root = 1.0 / power

    def seconds(self, rows: float) -> float:
        """Seconds for ``rows`` rows; none for no rows, as nothing is launched then."""
        if not rows:
            return 0.0
        flops = self._row_seconds * rows
        seconds: float = (self._bytes_seconds + flops**self._power) ** self._root
        return seconds


def layer_products(
    shape: ModelShape, gpu: Gpu, constants: ProductConstants, quantization: str
) -> Roofline:
    """All products of all layers, without the head."""
    weights = shape.num_layers * shape.layer_weights
    is_fp8 = quantization == FP8
    num_bytes = weights * (1 if is_fp8 else shape.number_bytes)
    flops = gpu.fp8_flops if is_fp8 else gpu.bf16_flops
    return Roofline(num_bytes / gpu.bytes_per_second, 2 * weights / flops, constants)


def head_product(shape: ModelShape, gpu: Gpu, constants: ProductConstants) -> Roofline:
    """The LM head, never quantised."""
    num_bytes = shape.head_weights * shape.number_bytes
    row = 2 * shape.head_weights / gpu.bf16_flops
    return Roofline(num_bytes / gpu.bytes_per_second, row, constants)


class Attention:
    """Paged attention over all layers: one call a layer for prefills and decodes together.

    Args:
        head_layers: layers, of the last, whose queries are only the rows that want logits.
    """

    __slots__ = (
        "_call", "_head_share", "_key", "_pair", "_power", "_prefill_row", "_root", "_sequence",
        "_square",
    )  # fmt: skip

    def __init__(
        self, shape: ModelShape, gpu: Gpu, constants: AttentionConstants, head_layers: int
    ) -> None:
        self._power = constants.sharpness
        self._root = 1.0 / constants.sharpness
        self._call = constants.layer_seconds * shape.num_layers
        self._sequence = constants.sequence_seconds * shape.num_layers
        self._key = shape.kv_bytes_per_token / gpu.bytes_per_second * constants.bytes_factor
        # A query row and a key cost two FLOPs for the score and two for its value, each number.
        flops = 4 * shape.query_size * shape.num_layers
        self._pair = flops / gpu.bf16_flops * constants.flops_factor
        self._head_share = head_layers / shape.num_layers
        self._square = self._pair * (1 - self._head_share)
        self._prefill_row = self._pair * self._head_share * BLOCK_ROWS

    def seconds(self, batch: PassBatch, head_rows: int) -> float:
        """Seconds of a pass whose head runs on ``head_rows`` rows."""
        row_keys: float = self._pair * batch.decode_row_keys
        if self._head_share and batch.decode_rows:
            decode_head_rows = head_rows - BLOCK_ROWS * batch.num_prefills
            left = max(0.0, 1 - decode_head_rows / batch.decode_rows)
            row_keys *= 1 - self._head_share * min(1.0, left)
        powers = (self._key * batch.decode_keys) ** self._power + row_keys**self._power
        decodes: float = powers**self._root
        return (
            self._call
            + self._sequence * (batch.num_decodes + batch.num_prefills)
            + decodes
            + self._square * batch.prefill_square_rows
            + self._prefill_row * batch.prefill_rows
        )


@dataclass(frozen=True, slots=True)
class SmallKernels:
    """Norms, RoPE, activation, page writes (and quantisation): a start, then bytes by the row."""

    start_seconds: float
    row_seconds: float

    def seconds(self, rows: float) -> float:
        """Seconds for ``rows`` rows."""
        return self.start_seconds + self.row_seconds * rows


def small_kernels(
    shape: ModelShape, gpu: Gpu, constants: SmallConstants, unfused: float = 1.0
) -> SmallKernels:
    """The small kernels of all layers, ``unfused`` times as slow as fused ones."""
    row = shape.num_layers * shape.small_kernel_bytes_per_row / gpu.bytes_per_second
    return SmallKernels(
        constants.layer_seconds * shape.num_layers * unfused,
        row * constants.bytes_factor * unfused,
    )


def sampling_kernel(shape: ModelShape, gpu: Gpu, constants: SamplingConstants) -> SmallKernels:
    """Argmax and confidence over the vocabulary, by the row."""
    row = shape.vocab_size * constants.bytes_per_logit / gpu.bytes_per_second
    return SmallKernels(constants.pass_seconds, row)
