"""NCCL as transfers see it: what is used of NVIDIA's ``nccl4py``, and how it is imported.

Nothing newer than NCCL 2.27.5, which the CUDA 12 image has. Imported only when the transport of
that name is asked for. Called by ``nccl_link``, which takes the library as an argument: tests pass
a fake of the same semantics, whose calls they bind against the installed release's signatures.
"""

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from sangam_core.errors import ConfigurationError
from sangam_worker.extras import HOW_TO_INSTALL

SUCCESS = 0
IN_PROGRESS = 7
"""``ncclResult_t``: every other value is an error."""

UNIQUE_ID_BYTES = 128


class Communicator(Protocol):
    """A non-blocking communicator: every call returns at once, and must be followed by
    ``get_async_error`` until that no longer says "in progress", before the next call and before
    anything else is queued on its stream."""

    def get_async_error(self) -> int:
        """``SUCCESS``, ``IN_PROGRESS`` or what has gone wrong."""
        ...

    def send(self, sendbuf: Tensor, peer: int, *, stream: int) -> None:
        """Queue a send on a stream."""
        ...

    def recv(self, recvbuf: Tensor, peer: int, *, stream: int) -> None:
        """Queue a receive on a stream."""
        ...

    def abort(self) -> None:
        """End what is under way, host calls in other threads included, and free it all."""
        ...


class Nccl(Protocol):
    """The part of ``nccl.core`` 0.6 that is used.

    ``Communicator.init(num_ranks, rank, unique_id, config)``, ``UniqueId.from_bytes``,
    ``NCCLConfig(blocking=, max_ctas=)``.
    """

    Communicator: Any
    UniqueId: Any
    NCCLConfig: Callable[..., Any]
    get_unique_id: Callable[[], Any]
    get_error_string: Callable[[int], str]
    get_version: Callable[[], Any]
    group: Callable[[], AbstractContextManager[None]]


def load_nccl(device: torch.device) -> Nccl:
    """The installed bindings, with a library behind them.

    Raises:
        ConfigurationError: either is not there, or the device is not one for NCCL.
    """
    if device.type != "cuda":
        raise ConfigurationError(f"SANGAM_KV_TRANSPORT nccl needs a CUDA device, not {device}")
    # NCCL's health service would join all processes that have ever met into one network, for
    # good. Workers come and go; their leases tell of it.
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")
    try:
        library = cast("Nccl", importlib.import_module("nccl.core"))
    except ImportError as error:
        raise ConfigurationError(
            f"SANGAM_KV_TRANSPORT nccl: nccl4py cannot be imported ({error}); {HOW_TO_INSTALL}, "
            "or set SANGAM_KV_TRANSPORT to gloo"
        ) from error
    if library.get_version().libnccl is None:
        raise ConfigurationError(
            "SANGAM_KV_TRANSPORT nccl: libnccl.so.2 cannot be loaded; install the nvidia-nccl of "
            "torch's CUDA version, or set SANGAM_KV_TRANSPORT to gloo"
        )
    return library
