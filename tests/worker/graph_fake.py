"""Graphs on a CPU: what was captured runs again, on the memory that it was captured with.

``RecordedCapture`` keeps what a CUDA graph keeps: the operators and kernels that were issued, with
the tensors that they were issued with, and nothing of the code that issued them. What a replay
would not see on a GPU (a tensor that was made anew, a number on the host) is out of date here as
well; what a capture refuses (to read a number of the device, to copy from the host, to plan) fails.
``EagerCapture`` runs the code again, for the torch backend, whose plan is lists on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves

from sangam_worker.graphs.capture import Replay

_REFUSED = {
    torch.ops.aten._local_scalar_dense.default: "reads a number of the device",
    torch.ops.aten.lift_fresh.default: "copies a tensor from the host",
    torch.ops.aten.nonzero.default: "waits for the device to know a size",
    torch.ops.aten.masked_select.default: "waits for the device to know a size",
    torch.ops.aten._pin_memory.default: "pins memory",
}


class Tape(TorchDispatchMode):
    """What is issued while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func not in _REFUSED, f"a captured operator {_REFUSED[func]}: {func}"
        is_masked = func is torch.ops.aten.index.Tensor and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        assert not is_masked, "a captured mask waits for the device to know a size"
        return self.issued(partial(func, *args, **(kwargs or {})))

    def issued(self, kernel: Callable[[], Any]) -> Any:
        """Run a kernel; every replay runs it again."""
        result = kernel()
        self._steps.append(partial(_again, kernel, result))
        return result

    def replay(self) -> None:
        """Run everything again, on the same memory."""
        for step in self._steps:
            step()


def _again(kernel: Callable[[], Any], result: Any) -> None:
    """A result that lies elsewhere this time goes to where the first one lay."""
    for old, new in zip(tree_leaves(result), tree_leaves(kernel()), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


def launch(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a fake of a kernel. In a capture it is one step, whatever it is made of."""
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, Tape):
        return kernel(*args, **kwargs)
    with _disable_current_modes():
        return mode.issued(partial(kernel, *args, **kwargs))


def refuse_while_capturing(what: str) -> None:
    """For calls that copy from the host, allocate or wait."""
    assert not isinstance(_get_current_dispatch_mode(), Tape), f"captured code may not {what}"


@dataclass
class EagerCapture:
    """``Capture`` that issues the same code again.

    Attributes:
        taken_bytes: what it says it took. num_captured, num_replayed: calls so far.
    """

    taken_bytes: int = 123
    num_captured: int = 0
    num_replayed: int = 0
    order: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def __call__(self, run: Callable[[], None]) -> Replay:
        number = self.num_captured
        self.num_captured += 1
        run()  # to warm up
        again = self._captured(run)

        def replay() -> None:
            self.num_replayed += 1
            self.order.append(number)
            again()

        return replay

    def seconds(self, replay: Replay) -> float:
        """Of what ``times`` says, in their order; the same for all where it says nothing."""
        replay()
        return self.times.pop(0) if self.times else 1.0

    def _captured(self, run: Callable[[], None]) -> Replay:
        run()
        return run


class RecordedCapture(EagerCapture):
    """``Capture`` that issues the same operators again, whatever the code would do by now."""

    def _captured(self, run: Callable[[], None]) -> Replay:
        tape = Tape()
        with tape:
            run()
        return tape.replay
