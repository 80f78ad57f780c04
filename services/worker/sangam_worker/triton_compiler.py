"""What Triton needs beside itself, told in a line where it is missing.

Triton compiles a launcher in C for every kernel, on the machine that runs it. Decides nothing else.
Called by whoever runs a kernel of Triton's for the first time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import SubprocessError

import torch

from sangam_core.errors import ConfigurationError


@contextmanager
def first_use(what: str) -> Iterator[None]:
    """For the first call of kernels: "the sampling kernel", say.

    Raises:
        ConfigurationError: they cannot be compiled or loaded.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError, SubprocessError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigurationError(
            f"{what} cannot be made by Triton: {lines[0][:300]}; it needs a C compiler (gcc, or "
            "what CC names), Python's headers, and a folder to write to (TRITON_CACHE_DIR)"
        ) from error
