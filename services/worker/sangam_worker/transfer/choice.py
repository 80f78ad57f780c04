"""Which transport a worker moves KV by: as set, or what suits its device.

Called by the worker's start. Both workers of a pair must have chosen alike; the exchange says so
when they have not.
"""

import structlog
import torch

from sangam_worker.device import TorchBuild, require_cuda
from sangam_worker.settings import WorkerSettings
from sangam_worker.transfer.cuda_streams import CudaStreams, allow_many_streams
from sangam_worker.transfer.gloo import GlooTransport
from sangam_worker.transfer.nccl import NcclTransport
from sangam_worker.transfer.nccl_library import load_nccl
from sangam_worker.transfer.pool import KVPool
from sangam_worker.transfer.protocol import KVTransport

log = structlog.get_logger(__name__)


def prepare_transport(settings: WorkerSettings, build: TorchBuild | None = None) -> None:
    """Before the process uses CUDA, and before it spends minutes on a model.

    Args:
        build: what torch has; the installed one by default.

    Raises:
        ConfigurationError: there is no such GPU; NCCL is to be used, and cannot be had here.
    """
    if settings.uses_nccl:
        allow_many_streams()
    if settings.is_on_cuda:
        require_cuda(settings.device, build or TorchBuild.here())
    if settings.uses_nccl:
        load_nccl(torch.device(settings.device))


def open_transport(settings: WorkerSettings, pool: KVPool) -> KVTransport:
    """The transport over a pool.

    Raises:
        ConfigurationError: NCCL cannot be had here, or the address is not this machine's.
    """
    if not settings.uses_nccl:
        return GlooTransport(pool, settings.reachable_host)
    return nccl_transport(pool, settings.nccl_max_ctas, settings.nccl_max_pairs)


def nccl_transport(pool: KVPool, max_ctas: int, pairs_each_way: int) -> NcclTransport:
    """NCCL over a pool on a GPU, ready to move. Nothing is in the pool yet, or rests in it."""
    library = load_nccl(pool.device)
    log.info("KV moves by NCCL", version=str(library.get_version().libnccl), max_ctas=max_ctas)
    streams = CudaStreams(pool.device)
    transport = NcclTransport(
        pool, library, streams, max_ctas=max_ctas, pairs_each_way=pairs_each_way
    )
    transport.warm_up()
    return transport
