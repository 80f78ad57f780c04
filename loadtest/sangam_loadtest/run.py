"""One load test from start to end: requests, schedule, sending, records on disk, summary.

Decides how long a run is, what is warm-up, and what Ctrl-C does (no more requests, those under way
are given up, everything so far is written and summed up). Called by the ``run`` command and, for
each probe, by ``capacity``.
"""

import asyncio
import gc
import json
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from sangam_core.errors import ConfigurationError, SangamError
from sangam_loadtest.arrivals import Arrivals, schedule
from sangam_loadtest.client.bodies import Bodies, BodyOptions
from sangam_loadtest.client.health import ClientHealth
from sangam_loadtest.client.open_loop import Due, Progress, Target, send_all
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.show import show_progress
from sangam_loadtest.summary import Summary, summarise
from sangam_loadtest.traces.source import TraceSpec, take_requests

_MODELS_SECONDS = 10.0
MAX_REQUESTS = 10_000_000


class TargetError(SangamError):
    """The server cannot be asked what it serves."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """A load test.

    Attributes:
        model: None asks the server which it serves.
        num_requests: counted ones, warm-up not included; None: as many as ``duration_seconds``
            holds at the mean rate.
        warmup_seconds: requests due earlier than this are sent but not counted.
        has_timings: ask for Sangam's timings.
        extra: further fields of every body.
    """

    target: Target
    trace: TraceSpec
    arrivals: Arrivals
    model: str | None = None
    num_requests: int | None = None
    duration_seconds: float | None = None
    warmup_seconds: float = 0.0
    has_timings: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.num_requests is None) == (self.duration_seconds is None):
            raise ConfigurationError("say either how many requests or for how long, not both")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigurationError("there must be at least one request")
        if self.duration_seconds is not None and self.duration_seconds <= 0:
            raise ConfigurationError("the duration must be positive")
        if self.warmup_seconds < 0:
            raise ConfigurationError("the warm-up cannot be negative")
        if self.target.timeout_seconds <= 0:
            raise ConfigurationError("the time-out must be positive")

    @property
    def rate(self) -> float | None:
        """The true mean rate of arrivals; None where the trace's own times say it."""
        return self.arrivals.true_rate


def planned(options: RunOptions) -> list[Due]:
    """Every request of a run with its due time; the same options give the same plan.

    Not inside a running event loop (tokenising a text trace needs one of its own).

    Raises:
        ConfigurationError: number or duration cannot be had of this trace.
        TraceError: the trace cannot be read or is too short.
    """
    count = _count(options)
    requests = take_requests(options.trace, count)
    times = schedule(options.arrivals, count, [request.arrival_seconds for request in requests])
    plan = [
        Due(index, at, request, is_warmup=at < options.warmup_seconds)
        for index, (at, request) in enumerate(zip(times.tolist(), requests, strict=True))
    ]
    if all(due.is_warmup for due in plan):
        raise ConfigurationError(
            f"every request is due within the warm-up of {options.warmup_seconds:g} s; "
            "send more, or warm up for less long"
        )
    return plan


def _count(options: RunOptions) -> int:
    if options.rate is None:
        if options.num_requests is None:
            raise ConfigurationError(
                "a trace's own times need a number of requests (--requests), or a rate to scale to"
            )
        return options.num_requests
    warmup = ceil(options.rate * options.warmup_seconds)
    if options.num_requests is not None:
        count = options.num_requests + warmup
    else:
        assert options.duration_seconds is not None  # __post_init__ holds it
        count = ceil(options.rate * (options.warmup_seconds + options.duration_seconds))
    if count > MAX_REQUESTS:
        raise ConfigurationError(f"{count} requests are more than a run can hold ({MAX_REQUESTS})")
    return max(1, count)


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run that is over, or was interrupted."""

    summary: Summary
    model: str
    is_interrupted: bool


def run(
    options: RunOptions, console: Console, records_path: Path | None, label: str = "load test"
) -> RunResult:
    """Do a load test. Records go to ``records_path`` line by line as requests end.

    Raises:
        TargetError: the server does not answer before the run.
    """
    plan = planned(options)
    allow_many_connections()
    records: list[RequestRecord] = []
    with _record_file(records_path) as write:

        def take(record: RequestRecord) -> None:
            records.append(record)
            write(record)

        model, health, is_interrupted = asyncio.run(_send(options, plan, take, console, label))
    return RunResult(summarise(records, health), model, is_interrupted)


async def _send(
    options: RunOptions,
    plan: list[Due],
    take: Callable[[RequestRecord], None],
    console: Console,
    label: str,
) -> tuple[str, ClientHealth, bool]:
    model = options.model or await served_model(options.target)
    seed = options.trace.seed
    bodies = Bodies(BodyOptions(model, options.has_timings, options.extra, seed))
    stop = asyncio.Event()
    progress = Progress()
    with _interrupts(stop), _plan_out_of_collections():
        showing = asyncio.create_task(show_progress(progress, console, label))
        try:
            health = await send_all(plan, options.target, bodies, take, stop, progress)
        finally:
            showing.cancel()
            with suppress(asyncio.CancelledError):
                await showing
    return model, health, stop.is_set()


async def served_model(target: Target) -> str:
    """The first model that the first URL serves."""
    url = f"{target.urls[0]}/v1/models"
    timeout = aiohttp.ClientTimeout(total=_MODELS_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=target.headers()) as session,
            session.get(url) as response,
        ):
            if response.status != 200:
                raise TargetError(f"{url}: HTTP {response.status}; name the model with --model")
            return str((await response.json())["data"][0]["id"])
    except TimeoutError as error:
        raise TargetError(f"{url}: no answer within {_MODELS_SECONDS:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise TargetError(f"{url}: {error}; is the server running?") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise TargetError(f"{url}: not a list of models; name the model with --model") from error


@contextmanager
def _plan_out_of_collections() -> Iterator[None]:
    """A plan of many thousand requests would be walked by each garbage collection, and the pause
    would show as latency."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _interrupts(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C ends the run in order; a second one kills as always."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def _record_file(path: Path | None) -> Iterator[Callable[[RequestRecord], object]]:
    if path is None:
        yield lambda record: None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    with file:
        yield lambda record: file.write(record.to_json() + "\n")


def allow_many_connections() -> int:
    """Raise this process's limit on open files as far as it may; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
