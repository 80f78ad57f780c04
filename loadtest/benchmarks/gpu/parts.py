"""Runs a benchmark's parts within its time, the most important ones first.

Decides what runs next, what a part's failure costs (that part) and when results are written (after
each part, so that a run that is cut off leaves what it had). What is measured the parts know.
Called by the commands ``benchmarks.gpu`` and ``benchmarks.gpu.serving``.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Record = dict[str, Any]
"""What a part found, as JSON; it fills the record as it goes, so that a failure keeps the rest."""


class Budget:
    """Seconds that are left, of a whole run or of one part of it."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._seconds = seconds

    @property
    def left_seconds(self) -> float:
        """What is left; negative when the time is over."""
        return self._seconds - self.used_seconds

    @property
    def used_seconds(self) -> float:
        """Since it began."""
        return self._clock() - self._started

    def part(self, seconds: float) -> "Budget":
        """The time of a part: so much, or what is left of this."""
        return Budget(min(seconds, self.left_seconds), self._clock)


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement.

    Attributes:
        run: fills the record; is expected to stop when its budget is used up, and then to note
            under ``cut_short`` what it left out.
        needs_kernels: FlashInfer's must be compiled before.
        least_seconds: it is not begun with less time left. most_seconds: its budget.
    """

    name: str
    run: Callable[[Record, Budget], None]
    needs_kernels: bool = False
    least_seconds: float = 0.0
    most_seconds: float = 60.0


class Kernels(Protocol):
    """Kernels that are being compiled meanwhile."""

    @property
    def is_ready(self) -> bool:
        """Whether nothing is under way any more, be it that it failed."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until it is ready, at most so long."""
        ...


@dataclass
class Run:
    """A run of several parts, and its file.

    Attributes:
        head: what the file says beside the parts (machine, options).
    """

    budget: Budget
    out: Path
    head: Record

    def __post_init__(self) -> None:
        self.parts: dict[str, Record] = {}
        self.write()  # complains now rather than after minutes

    def run_all(self, parts: Sequence[Part], kernels: Kernels) -> None:
        """Run the parts in order; one whose kernels are under way lets later ones go first."""
        waiting = list(parts)
        while waiting:
            ready = (item for item in waiting if kernels.is_ready or not item.needs_kernels)
            part = next(ready, None)
            if part is None:
                part = waiting[0]
                say(f"{self.budget.used_seconds:5.0f} s  waiting for kernels")
                kernels.wait(self.budget.left_seconds - part.least_seconds)
            waiting.remove(part)
            self.run_part(part, kernels.is_ready or not part.needs_kernels)

    def run_part(self, part: Part, is_ready: bool = True) -> None:
        """Run one part and note how it ended."""
        record = self.parts[part.name] = {"status": "running"}
        found: Record = {}
        record["found"] = found
        if not is_ready or self.budget.left_seconds < part.least_seconds:
            why = "its kernels are not compiled" if not is_ready else "no time was left"
            record |= {"status": "not run", "error": why}
        else:
            say(f"{self.budget.used_seconds:5.0f} s  {part.name}")
            self.write()  # should it hang, the file says in what
            own = self.budget.part(part.most_seconds)
            try:
                part.run(found, own)
                record["status"] = "cut short" if found.get("cut_short") else "done"
            except Exception as error:  # noqa: BLE001 - whatever a device throws costs one part
                record |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
                record["traceback"] = traceback.format_exc()
            record["seconds"] = round(own.used_seconds, 2)
        if record["status"] != "done":
            say(f"         {part.name}: {record['status']}: {_reason(record)}")
        self.write()

    def write(self) -> None:
        """Write everything so far, in one step."""
        content = {**self.head, "used_seconds": round(self.budget.used_seconds, 1)}
        text = json.dumps({**content, "parts": self.parts}, indent=1)
        beside = self.out.with_suffix(".part")
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(self.out)

    @property
    def complaints(self) -> list[str]:
        """Every part that did not do all that it should, in words."""
        return [
            f"{name}: {record['status']}: {_reason(record)}"
            for name, record in self.parts.items()
            if record["status"] != "done"
        ]


def _reason(record: Record) -> str:
    left_out = record["found"].get("cut_short")
    return record.get("error") or f"time was over before {', '.join(map(str, left_out or ()))}"


def say(line: str) -> None:
    """Progress, at once."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
