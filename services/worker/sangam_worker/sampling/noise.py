"""Noise as a pure function of (seed, block, step, position, vocabulary entry).

A counter-based generator (SplitMix64 of Steele et al. 2014): no state, so that results depend
neither on what else is in the batch nor on a restart, and integer arithmetic, so that every device
draws the same numbers. Called by ``candidates`` and ``rules``.
"""

from hashlib import blake2b

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB
_MANTISSA_BITS = 52


def noise_key(stream: str, *counters: int) -> int:
    """A signed 64-bit key for one (stream, counters...); streams are independent."""
    text = "/".join((stream, *map(str, counters)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def uniform(key: int) -> float:
    """One number strictly between 0 and 1."""
    bits = (key % 2**64) >> (64 - _MANTISSA_BITS)
    return (bits + 0.5) / 2.0**_MANTISSA_BITS


def gumbel(keys: Tensor, num_entries: int) -> Tensor:
    """Standard Gumbel noise, float64 ``[rows, num_entries]``, from int64 keys ``[rows]``."""
    counters = torch.arange(1, num_entries + 1, dtype=torch.int64, device=keys.device)
    bits = keys[:, None] + counters.mul_(_signed(_GAMMA))
    bits = (bits ^ _shifted(bits, 30)).mul_(_signed(_FIRST_FACTOR))
    bits = (bits ^ _shifted(bits, 27)).mul_(_signed(_SECOND_FACTOR))
    bits = _shifted(bits ^ _shifted(bits, 31), 64 - _MANTISSA_BITS)
    drawn = bits.double().add_(0.5).mul_(2.0**-_MANTISSA_BITS)
    noise: Tensor = drawn.log_().neg_().log_().neg_()
    return noise


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shifted(bits: Tensor, distance: int) -> Tensor:
    """A logical right shift: torch's keeps the sign."""
    shifted: Tensor = (bits >> distance) & (2 ** (64 - distance) - 1)
    return shifted
