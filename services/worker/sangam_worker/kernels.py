"""What the worker's start says about FlashInfer's kernels: here already, or compiled on first use.

Compiling takes a minute or more, in which a first request seems to hang; whoever reads the log
should know. Decides nothing, and imports neither FlashInfer nor torch. Called by ``__main__``.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path


def kernels_note(environment: Mapping[str, str] = os.environ) -> str | None:
    """One sentence; None where FlashInfer is not installed, as in the cpu image.

    The places are FlashInfer's own (its ``jit/env.py``): ``data/aot`` in the package, one folder
    a kernel, is looked at first; then ``.cache/flashinfer`` under ``FLASHINFER_WORKSPACE_BASE``.
    """
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return None
    num_compiled = len(list((Path(spec.origin).parent / "data" / "aot").glob("*/*.so")))
    cache = Path(environment.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache/flashinfer"
    kept = f"compiled on first use, which takes 1 to 3 minutes, and kept in {cache}"
    if num_compiled == 0:
        return f"no FlashInfer kernel came with the image: each is {kept}"
    return f"{num_compiled} FlashInfer kernels came with the image; any other is {kept}"
