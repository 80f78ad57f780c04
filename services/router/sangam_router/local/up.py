"""``sangam up``: a cluster on this machine for as long as the command runs.

Decides what the terminal shows and when all of it ends; the processes are ``cluster``'s.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sangam_core.errors import ConfigurationError
from sangam_core.unknown_settings import unknown_settings
from sangam_router.local.cluster import ClusterOptions, LocalCluster
from sangam_router.local.processes import ProcessEvent, ProcessState
from sangam_router.local.snippets import curl_line, openai_program

_NEEDED_BY_WORKERS = ("torch", "safetensors", "numpy")

_OPTION_OF = {
    "SANGAM_MODEL": "--model",
    "SANGAM_DTYPE": "--dtype",
    "SANGAM_OVERFLOW": "--no-overflow",
    "SANGAM_PUBLIC_PORT": "--port",
    "SANGAM_INTERNAL_PORT": "--internal-port",
    "SANGAM_REDIS_URL": "--redis-url",
    "SANGAM_REDIS_NAMESPACE": "--namespace",
    "SANGAM_ROLE": "--prefill, --decode, --colocated",
    "SANGAM_THETA_TOKENS": "--theta",
    "SANGAM_TAU_TOKENS_PREFILL": "--prefill-tau",
    "SANGAM_TAU_TOKENS_DECODE": "--tau",
    "SANGAM_TAU_TOKENS_COLOCATED": "--tau",
    "SANGAM_TOTAL_PAGES": "--pages",
}
"""Options of ``sangam up`` that say what a variable would."""

_STYLES = {
    ProcessState.STARTING: "yellow",
    ProcessState.READY: "green",
    ProcessState.RESTARTING: "bold red",
    ProcessState.FAILED: "bold red",
    ProcessState.STOPPED: "dim",
}


class Board:
    """What the terminal shows of the processes.

    On a terminal, a table while starting and lines afterwards; anywhere else lines alone.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, ProcessEvent] = {}
        self._live: Live | None = None
        self._is_stopping = False

    def __call__(self, event: ProcessEvent) -> None:
        """Take in a change of a process."""
        self._states[event.name] = event
        if self._live is not None:
            self._live.update(self._table())
        elif not self._is_quiet(event):
            self._console.print(_line(event))

    def __enter__(self) -> "Board":
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say_stopping(self) -> None:
        """From now on the end of a process is no news."""
        self._is_stopping = True
        self._console.print("stopping ...")

    def _is_quiet(self, event: ProcessEvent) -> bool:
        return self._is_stopping or event.state is ProcessState.STOPPED

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, event in self._states.items():
            told = f"{event.seconds:.1f} s" if event.seconds else event.detail
            table.add_row(name, Text(event.state.value, style=_STYLES[event.state]), told)
        return table


def _line(event: ProcessEvent) -> Text:
    told = {
        ProcessState.READY: f" after {event.seconds:.1f} s",
        ProcessState.FAILED: f" ({event.detail})",
        ProcessState.RESTARTING: f" in {event.seconds:.2g} s: it has ended ({event.detail})",
    }.get(event.state, "")
    return Text.assemble(f"{event.name}: ", (event.state.value, _STYLES[event.state]), told)


async def up(options: ClusterOptions, console: Console) -> None:
    """Start a cluster, say how to use it, and keep it alive until SIGINT or SIGTERM.

    Raises:
        ConfigurationError: the options, the machine or the installation do not allow it.
        StartFailed: a process could not start; everything has been stopped.
    """
    require_packages(_NEEDED_BY_WORKERS)
    for unknown in unknown_settings(os.environ):
        console.print(Text(f"{unknown.name}: {unknown.problem}", "yellow"), soft_wrap=True)
    board = Board(console)
    cluster = LocalCluster(options, report=board)
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, asked_to_end.set)
    try:
        with board:
            is_up = await _start_unless_ended(cluster, asked_to_end)
        if is_up:
            await _print_usage(cluster, console)
            await asked_to_end.wait()
    finally:
        if cluster.processes:
            board.say_stopping()
            await cluster.stop()
            console.print("stopped")


async def _start_unless_ended(cluster: LocalCluster, asked_to_end: asyncio.Event) -> bool:
    """Start; False when the user has changed their mind meanwhile."""
    starting = asyncio.create_task(cluster.start())
    ending = asyncio.create_task(asked_to_end.wait())
    try:
        await asyncio.wait([starting, ending], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            return True
        return False
    finally:
        for task in (starting, ending):
            task.cancel()
        await asyncio.gather(starting, ending, return_exceptions=True)


def require_packages(names: Sequence[str]) -> None:
    """Look for packages without importing them: routers run without what workers need.

    Raises:
        ConfigurationError: naming those that are not installed, and what to install.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"workers need the package {', '.join(missing)}, which is not installed; "
            "from the checkout: pip install '.[worker]'"
        )


def told_overruled(names: Sequence[str]) -> str:
    """One line on variables that do nothing here, with the options that do it instead."""
    told = [f"{name} (say {_OPTION_OF[name]})" if name in _OPTION_OF else name for name in names]
    return f"not taken from the environment, as sangam up decides it: {', '.join(told)}"


async def _print_usage(cluster: LocalCluster, console: Console) -> None:
    base_url = cluster.public_urls[0]
    model = await _served_model(cluster.http, base_url)

    def say(text: str) -> None:
        """Unwrapped and unstyled: lines that are copied must stay whole."""
        console.print(Text(text), soft_wrap=True)

    say("")
    say(f"Sangam is up: {cluster.options.roles}; model {model}")
    for place in cluster.routers:
        say(f"  {place.process.name}: {place.public_url}/v1")
        say(f"    fleet page {place.internal_url}/, metrics {place.internal_url}/metrics")
    say(f"  redis: {cluster.redis_url} (namespace {cluster.options.namespace})")
    say(f"  logs: {cluster.options.log_dir.resolve()}")
    if overruled := cluster.overruled(os.environ):
        say(f"  {told_overruled(overruled)}")
    say("\nTry it:\n")
    say(curl_line(base_url, model))
    say("\nor in Python (pip install openai):\n")
    say(openai_program(base_url, model))
    port_option = "" if base_url.endswith(":8000") else f" --url {base_url}"
    # As it was called: a virtual environment's commands are rarely on the PATH.
    command = sys.argv[0] if Path(sys.argv[0]).name == "sangam" else "sangam"
    say(f"or watch answers being unmasked: {command} chat{port_option}")
    say("\nCtrl-C stops everything.")


async def _served_model(http: aiohttp.ClientSession, base_url: str) -> str:
    async with http.get(f"{base_url}/v1/models") as response:
        response.raise_for_status()
        models = await response.json()
    return str(models["data"][0]["id"])
