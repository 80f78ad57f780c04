"""The ``sangam`` command: ``up``, ``chat``, and what other packages add.

Decides names and options, and turns our own errors into one line and an exit status; the work is
done elsewhere. Further commands come from the entry-point group ``sangam.commands`` (a typer app
each), so that this package need not know of them.
"""

import asyncio
import secrets
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sangam_core.errors import SangamError
from sangam_router.command_errors import errors_told
from sangam_router.local.chat import ChatOptions, chat
from sangam_router.local.cluster import ClusterOptions
from sangam_router.local.roles import resolve_roles
from sangam_router.local.up import up
from sangam_router.model_files import SHIPPED_MODEL

COMMANDS_GROUP = "sangam.commands"
"""Entry points of this group are typer apps; each becomes a command under its own name."""

DEFAULT_PORT = 8000
_LOGS = Path(".sangam/logs")

app = typer.Typer(
    help="Serving for diffusion language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class DType(StrEnum):
    """Number formats that workers know."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@app.command("up")
def up_command(
    prefill: Annotated[int | None, typer.Option(min=0, help="Workers that only prefill.")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Workers that only decode.")] = None,
    colocated: Annotated[
        int | None,
        typer.Option(min=0, help="Workers that do both. (Default: 2, or 0 beside others.)"),
    ] = None,
    routers: Annotated[int, typer.Option(min=1, help="Routers, each on a port of its own.")] = 1,
    tau: Annotated[
        int | None, typer.Option(min=1, help="Token budget of colocated and decode workers.")
    ] = None,
    prefill_tau: Annotated[
        int | None, typer.Option(min=1, help="Token budget of prefill workers.")
    ] = None,
    theta: Annotated[
        float | None,
        typer.Option(
            min=1, help="Outstanding tokens from which on prefills overflow. (Default: inf.)"
        ),
    ] = None,
    overflow: Annotated[
        bool, typer.Option(help="Whether prefills may overflow to colocated workers.")
    ] = True,
    model: Annotated[
        str, typer.Option(help="'small' (comes with Sangam), a folder, or a hub id.")
    ] = SHIPPED_MODEL,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Public port of the first router.")
    ] = DEFAULT_PORT,
    internal_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of its metrics and fleet page.")
    ] = 9000,
    redis_url: Annotated[
        str | None, typer.Option(help="A running Redis, instead of one of its own.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Prefix of the keys. (Default: sangam; a random one with --redis-url.)"),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where the logs go. (Default: .sangam/logs, with another --port its folder there.)"
        ),
    ] = None,
    pages: Annotated[
        int | None, typer.Option(min=1, help="KV pool of each worker, pages of 16 tokens.")
    ] = None,
    dtype: Annotated[DType | None, typer.Option(help="Of weights and KV.")] = None,
) -> None:
    """Start Redis, routers and workers here; stop them with Ctrl-C."""
    console = Console(highlight=False)
    with errors_told():
        options = ClusterOptions(
            log_dir=log_dir or log_dir_of(port),
            roles=resolve_roles(prefill, decode, colocated),
            num_routers=routers,
            model=model,
            public_port=port,
            internal_port=internal_port,
            redis_url=redis_url,
            namespace=namespace or _namespace(is_shared=redis_url is not None),
            tau_tokens=tau,
            prefill_tau_tokens=prefill_tau,
            theta_tokens=theta,
            is_overflow_allowed=overflow,
            total_pages=pages,
            dtype=dtype,
        )
        asyncio.run(up(options, console))


@app.command("chat")
def chat_command(
    url: Annotated[str, typer.Option(help="A router's public port.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Model to ask. (Default: the one served.)")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SANGAM_API_KEY", help="Where the router wants one.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    turns: Annotated[
        int,
        typer.Option(min=0, help="Earlier exchanges sent along (the small model has learnt one)."),
    ] = 1,
) -> None:
    """Talk to a router and watch the answers being unmasked."""
    options = ChatOptions(
        url=url.rstrip("/"),
        model=model,
        api_key=api_key,
        max_tokens=max_tokens,
        num_earlier_turns=turns,
    )
    with errors_told():
        chat(options, Console(highlight=False))


def log_dir_of(port: int) -> Path:
    """Where a fleet's logs go by default: a second one, on another port, keeps off the first's."""
    return _LOGS if port == DEFAULT_PORT else _LOGS / str(port)


def _namespace(*, is_shared: bool) -> str:
    """Two clusters on one Redis would take each other's workers for their own."""
    return f"sangam-{secrets.token_hex(3)}" if is_shared else "sangam"


def _missing(name: str, error: ImportError) -> typer.Typer:
    """Stands in for a command whose package is not installed, and says so when called."""
    stand_in = typer.Typer()

    @stand_in.callback(invoke_without_command=True, help=f"(not installed: {error})")
    def tell() -> None:
        with errors_told():
            raise SangamError(f"sangam {name} cannot be loaded: {error}")

    return stand_in


def add_commands(target: typer.Typer, found: list[EntryPoint]) -> None:
    """Add the apps of other packages."""
    for entry in found:
        try:
            target.add_typer(entry.load(), name=entry.name)
        except ImportError as error:
            target.add_typer(_missing(entry.name, error), name=entry.name)


def main() -> None:
    """Entry point of the ``sangam`` script."""
    add_commands(app, list(entry_points(group=COMMANDS_GROUP)))
    app()


if __name__ == "__main__":
    main()
