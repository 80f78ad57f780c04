"""``kubectl sangam``: commands and options, and our own errors as one line and an exit status.

The work is done elsewhere (``status``, ``rebalance``, ``drain``).
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from sangam_core.errors import SangamError
from sangam_router.command_errors import errors_told
from sangam_router.kubectl.cluster import Cluster, ClusterUnavailable, Target, connect
from sangam_router.kubectl.drain import drain, undrain
from sangam_router.kubectl.progress import Progress
from sangam_router.kubectl.rebalance import Rebalance
from sangam_router.kubectl.splits import parse_split
from sangam_router.kubectl.status import as_json, gather
from sangam_router.kubectl.status_view import render

_PIPE_COLUMNS = 1000
"""Width in a pipe: a worker is a line there, however long the scheduler's reason."""

_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?")

app = typer.Typer(
    name="kubectl sangam",
    help="Sangam on Kubernetes: its workers, their roles, and how to move them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Output(StrEnum):
    """Forms of the status."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None or not any(match.groups()):
        raise typer.BadParameter(f"{text!r}: write 90s, 5m, 1h30m or a number of seconds")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds


Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="(Default: the kubeconfig context's.)")
]
Release = Annotated[
    str | None,
    typer.Option("--release", "-r", help="Helm release. (Default: the namespace's only one.)"),
]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]
Kubeconfig = Annotated[
    str | None, typer.Option("--kubeconfig", help="(Default: KUBECONFIG, or ~/.kube/config.)")
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        parser=_seconds,
        metavar="DURATION",
        help="Longest wait for one step, as in 90s or 5m.",
    ),
]
PodName = Annotated[str, typer.Argument(metavar="POD", help="A worker pod.")]


@app.command("status")
def status_command(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on showing it.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o")] = Output.TABLE,
    interval: Annotated[
        float, typer.Option(min=0.2, help="Seconds between two looks of --watch.")
    ] = 2.0,
    namespace: Namespace = None,
    release: Release = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show workers, roles, loads, the waiting line and the routers."""
    console = _console()
    with _connected(Target(namespace, release, context, kubeconfig)) as cluster:
        if output is Output.JSON:
            if watch:
                raise SangamError("--watch shows a table; leave out -o json")
            console.print_json(data=as_json(gather(cluster)))
        elif watch:
            _watch(cluster, console, is_wide=output is Output.WIDE, interval_seconds=interval)
        else:
            _print(console, render(gather(cluster), is_wide=output is Output.WIDE))


@app.command("rebalance")
def rebalance_command(
    split: Annotated[
        list[str],
        typer.Argument(metavar="ROLE=COUNT...", help="As in prefill=4 colocated=4."),
    ],
    persist: Annotated[
        bool,
        typer.Option(
            "--persist",
            help="Also scale the StatefulSets, pod by pod, so that pods boot in these roles.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the steps.")] = False,
    timeout: Timeout = "5m",  # type: ignore[assignment]
    namespace: Namespace = None,
    release: Release = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Move workers between roles until there are so many of each. Safe to repeat."""
    with errors_told():
        wanted = parse_split(split)
    with _connected(Target(namespace, release, context, kubeconfig)) as cluster:
        progress = Progress(_console(), timeout_seconds=timeout)
        Rebalance(cluster, progress).run(wanted, is_persistent=persist, is_dry_run=dry_run)


@app.command("drain")
def drain_command(
    pod: PodName,
    force: Annotated[
        bool, typer.Option("--force", help="Even if it is the last that decodes or prefills.")
    ] = False,
    timeout: Timeout = "5m",  # type: ignore[assignment]
    namespace: Namespace = None,
    release: Release = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Let a worker take no new blocks, and wait until it holds none."""
    with _connected(Target(namespace, release, context, kubeconfig)) as cluster:
        drain(cluster, pod, Progress(_console(), timeout_seconds=timeout), is_forced=force)


@app.command("undrain")
def undrain_command(
    pod: PodName,
    timeout: Timeout = "5m",  # type: ignore[assignment]
    namespace: Namespace = None,
    release: Release = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Let a drained worker take blocks again."""
    with _connected(Target(namespace, release, context, kubeconfig)) as cluster:
        undrain(cluster, pod, Progress(_console(), timeout_seconds=timeout))


def _watch(cluster: Cluster, console: Console, *, is_wide: bool, interval_seconds: float) -> None:
    """Show the table until Ctrl-C; an API server that is away is said, and asked again."""
    if not console.is_terminal:
        while True:
            _print(console, _look(cluster, is_wide=is_wide))
            time.sleep(interval_seconds)
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            live.update(_look(cluster, is_wide=is_wide), refresh=True)
            time.sleep(interval_seconds)


def _look(cluster: Cluster, *, is_wide: bool) -> RenderableType:
    try:
        return render(gather(cluster), is_wide=is_wide)
    except ClusterUnavailable as error:
        return Text(str(error), style="red")


def _print(console: Console, shown: RenderableType) -> None:
    """In a pipe without the blanks that fill a table's last column."""
    if console.is_terminal:
        console.print(shown)
        return
    with console.capture() as captured:
        console.print(shown)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_COLUMNS
    return console


@contextmanager
def _connected(target: Target) -> Iterator[Cluster]:
    with errors_told():
        cluster = connect(target)
        try:
            yield cluster
        finally:
            cluster.close()


def main() -> None:
    """Entry point of the ``kubectl-sangam`` script."""
    app()


if __name__ == "__main__":
    main()
