"""An iteration under way: what the device was given, and how to take its results.

Decides what the host waits for: one event behind the iteration's last copy. Made by ``engine``,
held by ``loop`` until it asks for the outcome.
"""

from collections.abc import Callable
from contextlib import suppress

import torch

from sangam_core.errors import EngineError
from sangam_worker.plan import Launched, Outcome
from sangam_worker.sampling.sampler import Proposals


class DeviceSpan:
    """From the first of an iteration's operations on the device to the last, by its own clock."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._events = began, ended

    def begin(self) -> None:
        """Arrays are on their way; operations come next."""
        if self._events is not None:
            self._events[0].record()

    def end(self) -> None:
        """Everything has been handed over."""
        if self._events is not None:
            self._events[1].record()

    def wait(self) -> None:
        """Until the device has done everything."""
        if self._events is not None:
            self._events[1].synchronize()

    def settle(self) -> None:
        """Until the device has done what it was given, when no more of it is to come."""
        with suppress(RuntimeError):  # a device that has failed does nothing any more
            self.end()
            self.wait()

    @property
    def seconds(self) -> float | None:
        """Its length, once it is over; ``None`` on a CPU, where host and device are one."""
        if self._events is None:
            return None
        began, ended = self._events
        milliseconds: float = began.elapsed_time(ended)
        return milliseconds / 1000


class LaunchedIteration:
    """``Launched`` of the engine."""

    def __init__(self, iteration: int, proposals: Proposals, span: DeviceSpan) -> None:
        self._iteration, self._span = iteration, span
        self._proposals: Proposals | None = proposals

    @property
    def device_seconds(self) -> float | None:
        """See ``Launched``."""
        return self._span.seconds

    @torch.inference_mode()
    def outcome(self) -> Outcome:
        """Wait for the device, then apply the rules.

        K/V of the fed rows are on their pages when it returns, whether a row could commit or not.

        Raises:
            EngineError: it was asked for before.
        """
        if self._proposals is None:
            raise EngineError(f"iteration {self._iteration} has had its outcome")
        proposals, self._proposals = self._proposals, None
        self._span.wait()
        return Outcome(self._iteration, proposals.outcomes())


class HostIteration:
    """``Launched`` where the host is the device: it begins when somebody waits for it.

    Computing in the launch would hold back what the loop does beside a device: an iteration's
    events would come a whole pass late.
    """

    def __init__(self, start: Callable[[], Launched]) -> None:
        self._start: Callable[[], Launched] | None = start

    @property
    def device_seconds(self) -> float | None:
        """See ``Launched``."""
        return None

    def outcome(self) -> Outcome:
        """Compute, then apply the rules. ``EngineError`` when it was asked for before."""
        if self._start is None:
            raise EngineError("the iteration has had its outcome")
        start, self._start = self._start, None
        return start().outcome()
