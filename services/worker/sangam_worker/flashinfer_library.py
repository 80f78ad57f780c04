"""FlashInfer as the worker sees it: what is used of it, and how it is imported.

Imported only when a backend or operators of that name are asked for: a CPU has no use for it, and
its import takes seconds. Called by ``attention.flashinfer_backend`` and
``models.flashinfer_operators``, which take the library as an argument: tests pass a fake of the
same semantics, whose calls they bind against the installed release's signatures.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from sangam_core.errors import ConfigurationError
from sangam_worker.extras import HOW_TO_INSTALL
from sangam_worker.flashinfer_kernels import make_ninja_found

HEAD_DIMS = (64, 128, 256)
"""What FlashInfer's FA2 and FA3 kernels are compiled for (its ``is_fa3_prefill_head_dim_supported``
and ``DISPATCH_HEAD_DIM``, which also writes pages and rotates)."""


def kernel_dim(head_dim: int) -> int:
    """The least head dimension of the kernels that holds ``head_dim``.

    Raises:
        ConfigurationError: none is as large.
    """
    for each in HEAD_DIMS:
        if head_dim <= each:
            return each
    raise ConfigurationError(f"FlashInfer has no kernel for heads of {head_dim}, only {HEAD_DIMS}")


class FlashInfer(Protocol):
    """The part of ``flashinfer`` 0.6.18 that is used.

    A wrapper is made with a workspace, planned on the host once per iteration and run per layer.
    """

    BatchPrefillWithPagedKVCacheWrapper: Callable[..., Any]
    BatchPrefillWithRaggedKVCacheWrapper: Callable[..., Any]
    append_paged_kv_cache: Callable[..., None]
    apply_rope_with_cos_sin_cache_inplace: Callable[..., None]
    fused_add_rmsnorm: Callable[..., None]
    rmsnorm: Callable[..., torch.Tensor]
    silu_and_mul: Callable[..., torch.Tensor]


def load_flashinfer(device: torch.device, dtype: torch.dtype) -> FlashInfer:
    """The installed library, for a model of a dtype on a device.

    Raises:
        ConfigurationError: it is not there, or has no kernels for them.
    """
    if device.type != "cuda":
        raise ConfigurationError(f"FlashInfer needs a CUDA device, not {str(device)!r}")
    if dtype != torch.bfloat16:
        raise ConfigurationError(f"FlashInfer needs dtype bfloat16, not {str(dtype)[6:]}")
    # Norms from CUDA sources, which an image can bring along compiled. The default, where the
    # CUTLASS DSL is installed, compiles them in the process that first uses them.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    make_ninja_found()
    try:
        return cast("FlashInfer", importlib.import_module("flashinfer"))
    except ImportError as error:
        raise ConfigurationError(
            f"FlashInfer cannot be imported ({error}); {HOW_TO_INSTALL}"
        ) from error
