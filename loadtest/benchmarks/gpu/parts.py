"""Runs a benchmark's parts within its time, the most important ones first.

Decides what runs next, what a part's failure costs (that part) and when results are written: with
every line that a part says, no more often than once a second, so that a run that is killed at any
time leaves what it had. What is measured the parts know. Called by the commands
``benchmarks.gpu`` and ``benchmarks.gpu.serving``.
"""

import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sangam_core.errors import SangamError

Record = dict[str, Any]
"""What a part found, as JSON; it fills the record as it goes, so that a failure keeps the rest."""

LEFT_OUT = "left out"
"""Status of a part that is not for this machine."""

_HANGS_FACTOR, _HANGS_SECONDS = 1.3, 20.0
"""A part that takes so many times its time, and so much more, does not end."""

_ANSWER_SECONDS = 5.0
"""Of a device that is asked whether it works."""

_WRITE_SECONDS = 1.0
"""Between two writings of what a part has found so far."""


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
        num_waves: of FlashInfer's kernels that must be compiled before (``kernels``).
        least_seconds: it is not begun with less time left. most_seconds: its budget.
        left_out: why it cannot be run here, which is no complaint; empty where it can.
    """

    name: str
    run: Callable[[Record, Budget], None]
    num_waves: int = 0
    least_seconds: float = 0.0
    most_seconds: float = 60.0
    left_out: str = ""


class Kernels(Protocol):
    """Kernels that are being compiled meanwhile, in waves."""

    def is_ready(self, num_waves: int) -> bool:
        """Whether nothing of the first waves is under way any more, be it that it failed."""
        ...

    def wait(self, num_waves: int, seconds: float) -> None:
        """Wait until they are ready, at most so long."""
        ...

    def complaint(self, num_waves: int) -> str:
        """What of them failed without which nothing can be expected to run; empty: nothing."""
        ...


class DeviceLost(SangamError):
    """No call to the device works any more in this process."""


@dataclass
class Run:
    """A run of several parts, and its file.

    Attributes:
        head: what the file says beside the parts (machine, options).
        parts: what each found; those that are here already are not run again.
        is_well: whether the device still answers, asked after a failure.
        patience: parts may take so many times as long as they should: for slow machines.
        also_write: writes what else there is to be read of the results' file.
        device_state: clocks and the like, noted behind each part; nothing where unknown.
    """

    budget: Budget
    out: Path
    head: Record
    parts: dict[str, Record] = field(default_factory=dict)
    is_well: Callable[[], bool] = lambda: True
    patience: float = 1.0
    also_write: Callable[[Record], None] = lambda results: None
    device_state: Callable[[], str] = lambda: ""
    _written_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.write()  # complains now rather than after minutes

    def run_all(self, parts: Sequence[Part], kernels: Kernels) -> None:
        """Run the parts in order; one whose kernels are under way lets later ones go first.

        Where kernels failed, one part is tried all the same; when it fails, so would the others.

        Raises:
            DeviceLost: nothing more can be run in this process.
        """
        waiting = [part for part in parts if part.name not in self.parts]
        is_hopeless = False
        while waiting:
            part = next((item for item in waiting if kernels.is_ready(item.num_waves)), None)
            if part is None:
                part = waiting[0]
                say(f"{self.budget.used_seconds:5.0f} s  waiting for kernels")
                kernels.wait(part.num_waves, self.budget.left_seconds - part.least_seconds)
            waiting.remove(part)
            is_ready = kernels.is_ready(part.num_waves)
            complaint = kernels.complaint(part.num_waves) if is_ready else "are not compiled"
            if is_ready and not is_hopeless:
                self.run_part(part)
                is_hopeless = bool(complaint) and self.parts[part.name]["status"] == "failed"
            else:
                self.run_part(part, f"its kernels {complaint}" if complaint else "")

    def run_part(self, part: Part, cannot: str = "") -> None:
        """Run one part and note how it ended; ``cannot`` says why it is not even begun."""
        record = self.parts[part.name] = {"status": "running"}
        found: Record = {}
        record["found"] = found
        if not cannot and self.budget.left_seconds < part.least_seconds:
            cannot = "no time was left"
        if part.left_out:
            record |= {"status": LEFT_OUT, "error": part.left_out}
        elif cannot:
            record |= {"status": "not run", "error": cannot}
        else:
            say(f"{self.budget.used_seconds:5.0f} s  {part.name}")
            self.write()  # should it hang, the file says in what
            own = self.budget.part(self.patience * part.most_seconds)
            with _ended_if_it_hangs(own), _written_as_it_speaks(self._write_now_and_then):
                record |= _run(part, found, own)
            record["seconds"] = round(own.used_seconds, 2)
            if state := self.device_state():
                record["device"] = state
        if record["status"] != "done":
            say(f"         {part.name}: {record['status']}: {_reason(record)}")
        self.write()
        if record["status"] == "failed" and not self._is_well():
            raise DeviceLost(f"the device does not answer any more, after {part.name}")

    def _is_well(self) -> bool:
        """A device that hangs says neither yes nor no: then the process ends, and the next goes on
        behind the part."""
        with _ended_if_it_hangs(Budget(_ANSWER_SECONDS)):
            return self.is_well()

    def write(self) -> None:
        """Write everything so far."""
        content = {**self.head, "used_seconds": round(self.budget.used_seconds, 1)}
        results = {**content, "parts": self.parts}
        self._written_seconds = self.budget.used_seconds
        write_json(self.out, results)
        self.also_write(results)

    def _write_now_and_then(self) -> None:
        if self.budget.used_seconds - self._written_seconds >= _WRITE_SECONDS:
            self.write()

    @property
    def complaints(self) -> list[str]:
        """Every part that did not do all that it should on this machine, in words."""
        return [
            f"{name}: {record['status']}: {_reason(record)}"
            for name, record in self.parts.items()
            if record["status"] not in ("done", LEFT_OUT)
        ]


def parts_of(file: Path) -> dict[str, Record]:
    """What an earlier process found; the part that it ended in has failed."""
    if not file.exists():
        return {}
    parts: dict[str, Record] = json.loads(file.read_text(encoding="utf-8"))["parts"]
    for record in parts.values():
        if record["status"] == "running":
            record |= {"status": "failed", "error": "its process ended in it"}
    return parts


def end_running(file: Path) -> None:
    """Write into the file that the part that a process ended in has failed."""
    results = json.loads(file.read_text(encoding="utf-8"))
    results["parts"] = parts_of(file)
    write_json(file, results)


def write_json(file: Path, results: Record) -> None:
    """Write results in one step."""
    write_text(file, json.dumps(results, indent=1) + "\n")


def write_text(file: Path, text: str) -> None:
    """In one step: whoever is killed meanwhile leaves the file before or the whole of this one."""
    beside = file.with_suffix(".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def _run(part: Part, found: Record, budget: Budget) -> Record:
    """How it ended."""
    try:
        part.run(found, budget)
    except Exception as error:  # noqa: BLE001 - whatever a device throws costs one part
        told = f"{type(error).__name__}: {error}"
        return {"status": "failed", "error": told, "traceback": traceback.format_exc()}
    return {"status": "cut short" if found.get("cut_short") else "done"}


@contextmanager
def _ended_if_it_hangs(budget: Budget) -> Iterator[None]:
    """End the process, with every thread's traceback, when a part takes far too long."""
    last = _HANGS_FACTOR * budget.left_seconds + _HANGS_SECONDS
    faulthandler.dump_traceback_later(last, file=2, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _reason(record: Record) -> str:
    left_out = record["found"].get("cut_short")
    return record.get("error") or f"time was over before {', '.join(map(str, left_out or ()))}"


_listeners: list[Callable[[], None]] = []


@contextmanager
def _written_as_it_speaks(write: Callable[[], None]) -> Iterator[None]:
    """Write whenever the part that runs says something."""
    _listeners.append(write)
    try:
        yield
    finally:
        _listeners.remove(write)


def say(line: str) -> None:
    """Progress, at once; what a part has found by then is written."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    for listener in _listeners:
        listener()
