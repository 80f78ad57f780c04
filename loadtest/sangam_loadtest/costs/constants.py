"""The constants of the cost model: which there are, their units, and what is believable.

Decides names, units, bounds and choices; the values are in ``constants.toml`` and in the tables
that ``sangam loadtest fit`` writes. ``table`` reads and writes them, ``operators`` and ``model``
use them, ``fit`` finds them.
"""

from dataclasses import dataclass, field
from typing import Any


def constant(unit: str, low: float, high: float) -> Any:
    """A field that holds a number in ``unit``; ``low`` and ``high`` bound what is believable."""
    return field(metadata={"unit": unit, "low": low, "high": high})


def choice(*choices: str) -> Any:
    """A field that holds one of some words."""
    return field(metadata={"choices": choices})


@dataclass(frozen=True, slots=True)
class ProductConstants:
    """Matrix products: a p-norm of the time for their bytes and the time for their FLOPs.

    Attributes:
        bytes_factor, flops_factor: time over the bound at the device's ceilings.
        sharpness: p; the larger, the closer to the larger of the two times.
    """

    bytes_factor: float = constant("times the bound", 0.1, 100.0)
    flops_factor: float = constant("times the bound", 0.1, 100.0)
    sharpness: float = constant("exponent", 1.0, 16.0)


@dataclass(frozen=True, slots=True)
class AttentionConstants:
    """Paged attention of one backend: calls, sequences, and a roofline of keys and scores.

    Attributes:
        layer_seconds: a call's own time. sequence_seconds: that of each sequence in it.
        bytes_factor: reading the keys and values of decode blocks, over its bound.
        flops_factor: scores and their product with V, over their bound.
        sharpness: p of the p-norm of the two.
    """

    layer_seconds: float = constant("seconds a layer", 0.0, 1e-1)
    sequence_seconds: float = constant("seconds a layer and sequence", 0.0, 1e-1)
    bytes_factor: float = constant("times the bound", 0.1, 100.0)
    flops_factor: float = constant("times the bound", 0.1, 100.0)
    sharpness: float = constant("exponent", 1.0, 16.0)


@dataclass(frozen=True, slots=True)
class SmallConstants:
    """Norms, RoPE, activation, page writes, quantisation: all between products and attention.

    Attributes:
        layer_seconds: their own time, however few the rows.
        bytes_factor: time by the row, over that of the bytes that must move.
    """

    layer_seconds: float = constant("seconds a layer", 0.0, 1e-1)
    bytes_factor: float = constant("times the bound", 0.0, 100.0)


@dataclass(frozen=True, slots=True)
class SamplingConstants:
    """From logits to tokens and confidences: a pass's own time, and bytes moved for a logit."""

    pass_seconds: float = constant("seconds a pass", 0.0, 1e-1)
    bytes_per_logit: float = constant("bytes a logit", 0.0, 1e3)


@dataclass(frozen=True, slots=True)
class LaunchConstants:
    """Host time to issue a pass kernel by kernel, which the device's work hides or not.

    Attributes:
        layer_seconds: of one layer. attention_share: what of it issues the attention.
    """

    layer_seconds: float = constant("seconds a layer", 0.0, 1e-1)
    attention_share: float = constant("share", 0.0, 0.9)


@dataclass(frozen=True, slots=True)
class LinkConstants:
    """What joins two workers: the peak of one direction, and what of it large messages get."""

    bytes_per_second: float = constant("bytes/s", 1e6, 1e13)
    efficiency: float = constant("share", 0.01, 1.0)


@dataclass(frozen=True, slots=True)
class SystemConstants:
    """What a serving system does with the same kernels.

    Attributes:
        head_rows: rows that the LM head and sampling run on: every packed row, all rows of the
            current blocks, or only those that can commit.
        last_layer: rows that the last layer is computed for behind its K and V.
        sampling: the sampling kernel.
        decode_launch, prefill_launch: how passes without and with a prefill are issued.
        pass_seconds: host time of a pass that the device waits for.
        sequence_seconds, row_seconds: the same for each block or prefill, and each row.
        small_factor: small kernels' time over that of fused ones.
        launch_factor: time to issue a pass kernel by kernel, over that of fused ones.
        request_seconds: host time (router, HTTP, tokenising) in front of each block's prefill.
        transfers: KV transfers run beside the passes, or block both sides while they last.
        link: between workers, unless said otherwise.
        transfer_fixed_seconds: of a transfer's latency, whatever its size.
        transfer_bytes_per_second: the most that the system moves, on any link.
        transfer_busy_seconds: what a transfer beside a pass takes from it, on either side.
        memory_fraction: share of the device's memory that the system uses.
        logit_bytes: memory of a logit. pass_rows: packed rows of the largest pass.
        logit_rows: rows whose logits there is memory for; ``pass_rows`` where the head runs on
            every row.
    """

    head_rows: str = choice("every_row", "whole_blocks", "committable")
    last_layer: str = choice("every_row", "head_rows")
    sampling: str = choice("fused", "float64")
    decode_launch: str = choice("graph", "eager")
    prefill_launch: str = choice("graph", "eager")
    pass_seconds: float = constant("seconds a pass", 0.0, 10.0)
    sequence_seconds: float = constant("seconds a sequence", 0.0, 1.0)
    row_seconds: float = constant("seconds a row", 0.0, 1.0)
    small_factor: float = constant("times fused", 1.0, 100.0)
    launch_factor: float = constant("times fused", 0.0, 100.0)
    request_seconds: float = constant("seconds a block", 0.0, 10.0)
    transfers: str = choice("beside", "blocking")
    link: str = choice("nic", "nvlink")
    transfer_fixed_seconds: float = constant("seconds", 0.0, 10.0)
    transfer_bytes_per_second: float = constant("bytes/s", 1e3, 1e13)
    transfer_busy_seconds: float = constant("seconds", 0.0, 10.0)
    memory_fraction: float = constant("share", 0.01, 1.0)
    logit_bytes: float = constant("bytes a logit", 0.0, 64.0)
    pass_rows: float = constant("rows", 1.0, 1e7)
    logit_rows: float = constant("rows", 1.0, 1e7)
