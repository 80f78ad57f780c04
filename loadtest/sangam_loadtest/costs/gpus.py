"""A device's ceilings: arithmetic, memory bandwidth, memory.

Decides the terms; the numbers, with their sources, are in ``constants.toml`` under ``gpus``.
"""

from dataclasses import dataclass

from sangam_loadtest.costs.constants import constant


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device, of the kind that a worker has.

    Attributes:
        bf16_flops, fp8_flops: of dense products, as reached by large ones. On a CPU the first
            holds for the numbers that it serves in (float32), and the second is the same.
        bytes_per_second: of memory, as reached by copies, read plus written.
        memory_bytes: all of it.
    """

    bf16_flops: float = constant("FLOP/s", 1e6, 1e18)
    fp8_flops: float = constant("FLOP/s", 1e6, 1e18)
    bytes_per_second: float = constant("bytes/s", 1e6, 1e15)
    memory_bytes: float = constant("bytes", 1e6, 1e13)
