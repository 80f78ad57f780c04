"""Whether the device of ``SANGAM_DEVICE`` can be used, in words that name the variable and the fix.

Decides nothing else. Called at the start, before anything that needs the device is looked at: a
missing NCCL or FlashInfer is no news where there is no GPU.
"""

from dataclasses import dataclass

import torch

from sangam_core.counted import counted
from sangam_core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What this process's torch has.

    Attributes:
        version: torch's.
        cuda: the CUDA that it was built with; ``None`` for a build without.
        num_gpus: how many it sees.
    """

    version: str
    cuda: str | None
    num_gpus: int

    @classmethod
    def here(cls) -> "TorchBuild":
        """The installed one. Asks the driver for devices."""
        return cls(torch.__version__, torch.version.cuda, torch.cuda.device_count())


def require_cuda(name: str, build: TorchBuild) -> None:
    """Hold a device's name against what there is.

    Args:
        name: ``cuda`` or ``cuda:N``.

    Raises:
        ConfigurationError: there is no such GPU.
    """
    number = int(name.partition(":")[2] or 0)
    if build.cuda is None:
        trouble = f"torch {build.version} has no CUDA in it; install a CUDA build of torch"
    elif build.num_gpus == 0:
        trouble = (
            f"torch {build.version} (CUDA {build.cuda}) sees no GPU; nvidia-smi tells whether the "
            "driver does, and CUDA_VISIBLE_DEVICES may hide it"
        )
    elif number >= build.num_gpus:
        trouble = (
            f"torch sees {counted(build.num_gpus, 'GPU')}, counted from 0; choose one of those"
        )
    else:
        return
    raise ConfigurationError(f"SANGAM_DEVICE {name!r}: {trouble}, or set SANGAM_DEVICE to cpu")
