"""One load test from start to end: requests, schedule, sending, records on disk, summary.

Decides what Ctrl-C does (no more requests, those under way are given up, everything so far is
written and summed up). Called by the ``run`` command and, for each probe, by ``capacity``.
"""

import asyncio
import gc
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from sangam_core.errors import ConfigurationError, SangamError
from sangam_loadtest.client.bodies import Bodies, BodyOptions
from sangam_loadtest.client.health import ClientHealth
from sangam_loadtest.client.open_loop import Progress, Target, send_all
from sangam_loadtest.load import Due, Load, planned
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.run_files import opened
from sangam_loadtest.show import show_progress
from sangam_loadtest.summary import Summary, summarise

_MODELS_SECONDS = 10.0


class TargetError(SangamError):
    """The server cannot be asked what it serves, or does not serve what is asked of it."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """A load test.

    Attributes:
        model: None asks the server which it serves.
        has_timings: ask for Sangam's timings.
        extra: further fields of every body.
    """

    load: Load
    target: Target
    model: str | None = None
    has_timings: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.target.timeout_seconds <= 0:
            raise ConfigurationError("the time-out must be positive")

    def asked(self) -> dict[str, Any]:
        """What was asked for, for files: flat plain data, without the key."""
        asked = {**asdict(self.load), **asdict(self)}
        del asked["load"], asked["target"]["api_key"]
        return asked


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run that is over, or was interrupted."""

    summary: Summary
    model: str
    is_interrupted: bool


def run(
    options: RunOptions, console: Console, records_path: Path | None, title: str = "load test"
) -> RunResult:
    """Do a load test. Records go to ``records_path`` line by line as requests end.

    Args:
        title: what the progress shown is called.

    Raises:
        TargetError: before the run the server does not say what it serves, and no model is named;
            or it does, and not the one named.
    """
    plan = planned(options.load)
    model = asyncio.run(model_to_ask(options))
    allow_many_connections()
    records: list[RequestRecord] = []
    with _record_file(records_path) as write:

        def take(record: RequestRecord) -> None:
            records.append(record)
            write(record)

        sending = _send(options, model, plan, take, console, title)
        health, is_interrupted = asyncio.run(sending)
    return RunResult(summarise(records, health), model, is_interrupted)


async def _send(
    options: RunOptions,
    model: str,
    plan: list[Due],
    take: Callable[[RequestRecord], None],
    console: Console,
    title: str,
) -> tuple[ClientHealth, bool]:
    seed = options.load.trace.seed
    bodies = Bodies(BodyOptions(model, options.has_timings, options.extra, seed))
    stop = asyncio.Event()
    progress = Progress()
    with _interrupts(stop), _plan_out_of_collections():
        showing = asyncio.create_task(show_progress(progress, console, title))
        try:
            health = await send_all(plan, options.target, bodies, take, stop, progress)
        finally:
            showing.cancel()
            with suppress(asyncio.CancelledError):
                await showing
    return health, stop.is_set()


async def model_to_ask(options: RunOptions) -> str:
    """The model named, or the first that the first URL serves.

    A named one is held against the server's list, where it gives one (another than Sangam's may
    have none): a run of nothing but refusals would be of no use.
    """
    named = options.model
    try:
        served = await _served_models(options.target)
    except TargetError:
        if named is None:
            raise
        return named
    if named is not None and named not in served:
        raise TargetError(
            f"--model {named}: {options.target.urls[0]} does not serve it; "
            f"it serves {', '.join(served)}"
        )
    return named or served[0]


async def _served_models(target: Target) -> list[str]:
    """What the first URL serves, one model at least."""
    url = f"{target.urls[0]}/v1/models"
    timeout = aiohttp.ClientTimeout(total=_MODELS_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=target.headers()) as session,
            session.get(url) as response,
        ):
            if response.status != 200:
                raise TargetError(f"{url}: HTTP {response.status}; name the model with --model")
            served = [str(model["id"]) for model in (await response.json())["data"]]
    except TimeoutError as error:
        raise TargetError(f"{url}: no answer within {_MODELS_SECONDS:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise TargetError(f"{url}: {error}; is the server running?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TargetError(f"{url}: not a list of models; name the model with --model") from error
    if not served:
        raise TargetError(f"{url}: lists no model; name the model with --model")
    return served


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
    with opened(path) as file:
        yield lambda record: file.write(record.to_json() + "\n")


def allow_many_connections() -> int:
    """Raise this process's limit on open files as far as it may; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
