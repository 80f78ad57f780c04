"""How many bytes of tensors are alive while torch works, and the most that there were."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveMemory(TorchDispatchMode):
    """Counts what is made while it is entered; what was there before does not count.

    Attributes:
        peak_bytes: the most that was alive at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive = WeakIdKeyDictionary()
        self.peak_bytes = 0

    @property
    def alive_bytes(self) -> int:
        """What is alive now."""
        return sum(self._alive.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._counted(func(*args, **(kwargs or {})))

    def as_one_kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that counts with its results only, as a kernel in its place would."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                result = function(*args, **kwargs)
            return self._counted(result)

        return call

    def _counted(self, result: Any) -> Any:
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage not in self._alive:
                    self._alive[storage] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        return result
