"""The installed nccl4py's signatures, against which every call of the fake is bound.

Importing it needs no GPU and no NCCL library.
"""

import functools
import importlib.util
import inspect

INSTALL = (
    "pip install --no-deps -c constraints-gpu.txt nccl4py cuda-core cuda-bindings cuda-pathfinder"
)


def is_installed() -> bool:
    """Whether calls can be bound."""
    names = ("nccl", "cuda", "cuda.core")  # in this order: a part is looked for in its whole
    return all(importlib.util.find_spec(name) is not None for name in names)


@functools.cache
def signature(name: str) -> inspect.Signature:
    """Of something in ``nccl.core``, ``self`` and ``cls`` left out."""
    import nccl.core  # here, since it is a GPU's

    found: object = nccl.core
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)
    of = inspect.signature(found)
    return of.replace(parameters=[each for each in of.parameters.values() if each.name != "self"])


def bind(name: str, *arguments: object, **named: object) -> None:
    """Fail where the installed release would not take a call."""
    if is_installed():
        signature(name).bind(*arguments, **named)
