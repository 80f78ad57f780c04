"""Which transport a worker moves KV with: as set, or what suits its device.

Called by ``__main__`` once the engine is there. Both workers of a pair must have chosen alike; the
exchange says so when they have not.
"""

from typing import Protocol

import structlog
import torch

from sangam_core.errors import ConfigurationError
from sangam_worker.transfer.cuda_streams import CudaStreams
from sangam_worker.transfer.gloo import GlooTransport
from sangam_worker.transfer.layer_rows import LayeredPool
from sangam_worker.transfer.nccl import NcclTransport
from sangam_worker.transfer.nccl_library import load_nccl
from sangam_worker.transfer.pool import KVPool
from sangam_worker.transfer.protocol import KVTransport

TRANSPORTS = ("auto", "gloo", "nccl")
"""``auto``: NCCL for pools on a GPU, gloo for others."""

log = structlog.get_logger(__name__)


class MovablePool(KVPool, LayeredPool, Protocol):
    """A pool that any transport can move."""


def open_transport(
    name: str, pool: MovablePool, *, device: torch.device, host: str, max_ctas: int
) -> KVTransport:
    """The transport of a name in ``TRANSPORTS``.

    Args:
        device: the pool's.
        host: the address that gloo binds.
        max_ctas: thread blocks of an NCCL send or receive.

    Raises:
        ConfigurationError: it cannot be had here.
    """
    if name not in TRANSPORTS:
        raise ConfigurationError(f"SANGAM_KV_TRANSPORT {name!r}: one of {', '.join(TRANSPORTS)}")
    if name == "gloo" or (name == "auto" and device.type != "cuda"):
        return GlooTransport(pool, host)
    library = load_nccl(device)
    log.info("KV moves by NCCL", version=str(library.get_version().libnccl), max_ctas=max_ctas)
    return NcclTransport(pool, library, CudaStreams(device), max_ctas=max_ctas)
