"""Options that several commands share, and how they become specs.

Decides names, help and checks of single values on the command line; what values mean together is
checked by the specs (``TraceSpec``, ``Arrivals``, ``RunOptions``). Called by the commands.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sangam_core.errors import ConfigurationError
from sangam_loadtest.client.open_loop import Target
from sangam_loadtest.traces.csv_file import Columns
from sangam_loadtest.traces.source import LengthFilter, TraceSpec
from sangam_loadtest.traces.synthetic import SYNTHETIC_TRACES, Sessions
from sangam_router.model_files import SHIPPED_MODEL

_TRACE, _SERVER, _ARRIVALS = "Trace", "Server", "Arrivals"


def _number(help_text: str, panel: str, minimum: float | None = None) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel, min=minimum)


UrlsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        help="A router's public port; several are used in turn. (Default: http://127.0.0.1:8000)",
        rich_help_panel=_SERVER,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(help="Model to ask. (Default: the one served.)", rich_help_panel=_SERVER),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(envvar="SANGAM_API_KEY", help="Where it wants one.", rich_help_panel=_SERVER),
]
TimeoutOption = Annotated[
    float,
    _number("Seconds from when a request is due; then it has failed.", _SERVER, 0.001),
]
TimingsOption = Annotated[
    bool,
    typer.Option(help="Ask for Sangam's timings; off for other servers.", rich_help_panel=_SERVER),
]
ExtraOption = Annotated[
    str | None,
    typer.Option(
        "--body",
        help='Further fields of every body, as JSON: \'{"unmasking": "threshold"}\'.',
        rich_help_panel=_SERVER,
    ),
]
TraceOption = Annotated[
    str,
    typer.Option(
        help="sharegpt or arxiv (synthetic, the paper's statistics), questions (the shipped "
        "model's own, answers checked), or a file: .csv of lengths, .json ShareGPT, .jsonl arXiv.",
        rich_help_panel=_TRACE,
    ),
]
SeedOption = Annotated[int, _number("Of lengths, order and arrivals.", _TRACE, 0)]
SessionsOption = Annotated[
    bool,
    typer.Option(
        "--sessions",
        help="Synthetic traces: successive requests resemble each other, as in ShareGPT.",
        rich_help_panel=_TRACE,
    ),
]
TokenizerOption = Annotated[
    str,
    typer.Option(
        help="The served model, whose tokenizer counts texts: small, a folder, or a hub id.",
        rich_help_panel=_TRACE,
    ),
]
OrderOption = Annotated[
    bool,
    typer.Option(
        "--in-file-order", help="Do not shuffle a file's requests.", rich_help_panel=_TRACE
    ),
]
RepeatOption = Annotated[
    bool,
    typer.Option("--repeat", help="Begin again at a file's end.", rich_help_panel=_TRACE),
]
MinPromptOption = Annotated[int, _number("Tokens.", _TRACE, 1)]
MaxPromptOption = Annotated[int | None, _number("Tokens.", _TRACE, 1)]
MinOutputOption = Annotated[int, _number("Tokens.", _TRACE, 1)]
MaxOutputOption = Annotated[int | None, _number("Tokens.", _TRACE, 1)]
MaxTotalOption = Annotated[int | None, _number("Prompt + output, tokens.", _TRACE, 2)]
ColumnsOption = Annotated[
    str | None,
    typer.Option(
        help="A CSV's columns of prompt and output lengths and, if any, arrival times: "
        "'context,generated,at'. (Default: names that public traces use.)",
        rich_help_panel=_TRACE,
    ),
]
BurstinessOption = Annotated[
    float,
    _number("gamma: squared coefficient of variation of a gap; 1 is Poisson.", _ARRIVALS, 0.001),
]
WarmupOption = Annotated[
    float,
    typer.Option(min=0, help="Requests due in the first so many seconds are not counted."),
]
RequestsOption = Annotated[
    int | None, typer.Option(min=1, help="How many are counted (instead of --duration).")
]


def target_of(urls: list[str] | None, api_key: str | None, timeout: float) -> Target:
    """Where requests go. URLs may end in ``/v1`` or not."""
    found = []
    for url in urls or ["http://127.0.0.1:8000"]:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"--url {url}: must begin with http:// or https://")
        found.append(url.rstrip("/").removesuffix("/v1"))
    return Target(tuple(found), api_key, timeout)


def extra_of(body: str | None) -> dict[str, Any]:
    """Further fields of every body."""
    if body is None:
        return {}
    try:
        fields = json.loads(body)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}"
        raise ConfigurationError(f"--body: not JSON: {error.msg} at {where}") from error
    if not isinstance(fields, dict):
        raise ConfigurationError("--body: must be a JSON object")
    if taken := sorted({"stream", "stream_options", "prompt", "messages", "model"} & set(fields)):
        raise ConfigurationError(f"--body: {', '.join(taken)} is the load test's own to set")
    return fields


def columns_of(columns: str | None) -> Columns:
    """Two or three names, separated by commas."""
    if columns is None:
        return Columns()
    names = [name.strip() for name in columns.split(",")]
    if len(names) not in (2, 3) or not all(names):
        raise ConfigurationError(
            f"--columns {columns}: must be two or three names: prompt,output[,arrival]"
        )
    return Columns(*names)


def trace_of(
    trace: str,
    seed: int,
    lengths: LengthFilter,
    *,
    has_sessions: bool = False,
    tokenizer: str = SHIPPED_MODEL,
    in_file_order: bool = False,
    has_own_times: bool = False,
    is_repeated: bool = False,
    columns: str | None = None,
) -> TraceSpec:
    """A trace as the command line names it. Options that would have no effect are refused.

    Args:
        has_own_times: arrivals are the trace's time stamps, which keeps a file's order.
    """
    is_file = bool(Path(trace).suffix)
    if (in_file_order or is_repeated) and not is_file:
        raise ConfigurationError(f"--in-file-order and --repeat are for files, not for {trace!r}")
    if columns is not None and not trace.endswith(".csv"):
        raise ConfigurationError(f"--columns is for .csv files, not for {trace!r}")
    if has_sessions and trace not in SYNTHETIC_TRACES:
        raise ConfigurationError(f"--sessions is for synthetic traces, not for {trace!r}")
    return TraceSpec(
        trace,
        seed,
        lengths,
        Sessions() if has_sessions else None,
        columns_of(columns),
        tokenizer,
        in_file_order or has_own_times,
        is_repeated,
    )
