"""Options that several commands share, as groups, and how they become specs.

Decides names, help, defaults and checks of single values on the command line; what values mean
together is checked by the specs (``TraceSpec``, ``Arrivals``, ``Load``, ``RunOptions``). A command
takes a group as one parameter (see ``spread_options``).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sangam_core.errors import ConfigurationError
from sangam_loadtest.arrivals import ArrivalProcess, Arrivals
from sangam_loadtest.client.open_loop import Target
from sangam_loadtest.load import Load
from sangam_loadtest.run import RunOptions
from sangam_loadtest.traces.csv_file import Columns
from sangam_loadtest.traces.length_filter import LengthFilter
from sangam_loadtest.traces.source import TraceSpec
from sangam_loadtest.traces.synthetic import SYNTHETIC_TRACES, Sessions
from sangam_router.model_files import SHIPPED_MODEL

_TRACE, _SERVER, _ARRIVALS = "Trace", "Server", "Arrivals"
_DEFAULT_SECONDS = 60.0


def _option(panel: str | None, help_text: str, *names: str, minimum: float | None = None) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, min=minimum)


RateOption = Annotated[float | None, _option(_ARRIVALS, "Requests a second.", minimum=0.000001)]
RecordsOption = Annotated[
    Path | None,
    _option(
        None,
        "Records, one JSON object a request; the summary goes beside it. "
        "(Default: .sangam/loadtest/<time>.jsonl)",
    ),
]


@dataclass(frozen=True)
class LoadOptions:
    """A load but its rate, which commands name differently."""

    arrivals: Annotated[
        ArrivalProcess,
        _option(
            _ARRIVALS,
            "Process of arrival. trace: a CSV's time stamps (scaled, where there is a rate); "
            "clipped: the paper's generator, whose true rate is 5.2 % above the nominal one.",
        ),
    ] = ArrivalProcess.POISSON
    burstiness: Annotated[
        float,
        _option(
            _ARRIVALS,
            "gamma: squared coefficient of variation of a gap; 1 is Poisson.",
            minimum=0.001,
        ),
    ] = 4.0
    requests: Annotated[
        int | None,
        _option(_ARRIVALS, "How many are counted (instead of --duration).", minimum=1),
    ] = None
    duration: Annotated[
        float | None,
        _option(_ARRIVALS, "Seconds of arrivals that are counted. (Default: 60)", minimum=0.001),
    ] = None
    warmup: Annotated[
        float,
        _option(_ARRIVALS, "Requests due in the first so many seconds are not counted.", minimum=0),
    ] = 0.0
    trace: Annotated[
        str,
        _option(
            _TRACE,
            "sharegpt or arxiv (synthetic, the paper's statistics), questions (the shipped "
            "model's own, answers checked), or a file: .csv of lengths, .json ShareGPT, "
            ".jsonl arXiv.",
        ),
    ] = "questions"
    seed: Annotated[int, _option(_TRACE, "Of lengths, order and arrivals.", minimum=0)] = 0
    sessions: Annotated[
        bool,
        _option(
            _TRACE,
            "Synthetic traces: successive requests resemble each other, as in ShareGPT.",
            "--sessions",
        ),
    ] = False
    tokenizer: Annotated[
        str,
        _option(
            _TRACE,
            "The served model, whose tokenizer counts texts: small, a folder, or a hub id.",
        ),
    ] = SHIPPED_MODEL
    in_file_order: Annotated[
        bool, _option(_TRACE, "Do not shuffle a file's requests.", "--in-file-order")
    ] = False
    repeat: Annotated[bool, _option(_TRACE, "Begin again at a file's end.", "--repeat")] = False
    columns: Annotated[
        str | None,
        _option(
            _TRACE,
            "A CSV's columns of prompt and output lengths and, if any, arrival times: "
            "'context,generated,at'. (Default: names that public traces use.)",
        ),
    ] = None
    min_prompt: Annotated[int, _option(_TRACE, "Tokens.", minimum=1)] = 1
    max_prompt: Annotated[int | None, _option(_TRACE, "Tokens.", minimum=1)] = None
    min_output: Annotated[int, _option(_TRACE, "Tokens.", minimum=1)] = 1
    max_output: Annotated[int | None, _option(_TRACE, "Tokens.", minimum=1)] = None
    max_total: Annotated[int | None, _option(_TRACE, "Prompt + output, tokens.", minimum=2)] = None

    def load(self, rate: float | None) -> Load:
        """The load at a rate; None leaves it to a trace's own times."""
        duration = self.duration
        if self.requests is None and duration is None:
            duration = _DEFAULT_SECONDS
        return Load(
            trace=self.trace_spec(),
            arrivals=Arrivals(self.arrivals, rate, self.burstiness, self.seed),
            num_requests=self.requests,
            duration_seconds=duration,
            warmup_seconds=self.warmup,
        )

    def trace_spec(self) -> TraceSpec:
        """The trace as the options name it. Those that would have no effect are refused."""
        trace = self.trace
        is_file = bool(Path(trace).suffix)
        if (self.in_file_order or self.repeat) and not is_file:
            raise ConfigurationError(
                f"--in-file-order and --repeat are for files, not for {trace!r}"
            )
        if self.columns is not None and not trace.endswith(".csv"):
            raise ConfigurationError(f"--columns is for .csv files, not for {trace!r}")
        if self.sessions and trace not in SYNTHETIC_TRACES:
            raise ConfigurationError(f"--sessions is for synthetic traces, not for {trace!r}")
        return TraceSpec(
            trace,
            self.seed,
            LengthFilter(
                self.min_prompt, self.max_prompt, self.min_output, self.max_output, self.max_total
            ),
            Sessions() if self.sessions else None,
            _columns_of(self.columns),
            self.tokenizer,
            # A trace's own times are of its requests in their order.
            self.in_file_order or self.arrivals is ArrivalProcess.TRACE,
            self.repeat,
        )


@dataclass(frozen=True)
class ServerOptions:
    """Where requests go, and what each of them says."""

    url: Annotated[
        list[str] | None,
        _option(
            _SERVER,
            "A router's public port; several are used in turn. (Default: http://127.0.0.1:8000)",
        ),
    ] = None
    model: Annotated[str | None, _option(_SERVER, "Model to ask. (Default: the one served.)")] = (
        None
    )
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SANGAM_API_KEY", help="Where it wants one.", rich_help_panel=_SERVER),
    ] = None
    timeout: Annotated[
        float,
        _option(_SERVER, "Seconds from when a request is due; then it has failed.", minimum=0.001),
    ] = 600.0
    timings: Annotated[
        bool, _option(_SERVER, "Ask for Sangam's timings; off for other servers.")
    ] = True
    body: Annotated[
        str | None,
        _option(_SERVER, 'Further fields of every body, as JSON: \'{"unmasking": "threshold"}\'.'),
    ] = None

    def run_options(self, load: Load) -> RunOptions:
        """A load test of that server with a load."""
        return RunOptions(
            load,
            self.target(),
            model=self.model,
            has_timings=self.timings,
            extra=_extra_of(self.body),
        )

    def target(self) -> Target:
        """Where requests go. URLs may end in ``/v1`` or not."""
        found = []
        for url in self.url or ["http://127.0.0.1:8000"]:
            if not url.startswith(("http://", "https://")):
                raise ConfigurationError(f"--url {url}: must begin with http:// or https://")
            found.append(url.rstrip("/").removesuffix("/v1"))
        return Target(tuple(found), self.api_key, self.timeout)


def _extra_of(body: str | None) -> dict[str, Any]:
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


def _columns_of(columns: str | None) -> Columns:
    """Two or three names, separated by commas."""
    if columns is None:
        return Columns()
    names = [name.strip() for name in columns.split(",")]
    if len(names) not in (2, 3) or not all(names):
        raise ConfigurationError(
            f"--columns {columns}: must be two or three names: prompt,output[,arrival]"
        )
    return Columns(*names)
