"""``sangam loadtest run``: options, and where the results go. The work is ``run``'s."""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sangam_core.errors import SangamError
from sangam_loadtest import options as o
from sangam_loadtest.arrivals import ArrivalProcess, Arrivals
from sangam_loadtest.run import RunOptions, RunResult, run, write_json
from sangam_loadtest.show import show_summary
from sangam_loadtest.traces.source import LengthFilter
from sangam_router.command_errors import errors_told
from sangam_router.model_files import SHIPPED_MODEL

_INTERRUPTED_STATUS = 130


def run_command(
    rate: Annotated[
        float | None, typer.Option(min=0.000001, help="Requests a second.", rich_help_panel="Load")
    ] = None,
    arrivals: Annotated[
        ArrivalProcess,
        typer.Option(
            help="Process of arrival. trace: a CSV's time stamps (scaled, with --rate); clipped: "
            "the paper's generator, whose true rate is 5.2 % above the nominal one.",
            rich_help_panel="Arrivals",
        ),
    ] = ArrivalProcess.POISSON,
    requests: o.RequestsOption = None,
    duration: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds of arrivals that are counted.")
    ] = None,
    warmup: o.WarmupOption = 0.0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Records, one JSON object a request; the summary goes beside it. "
            "(Default: .sangam/loadtest/<time>.jsonl)"
        ),
    ] = None,
    trace: o.TraceOption = "questions",
    seed: o.SeedOption = 0,
    sessions: o.SessionsOption = False,
    tokenizer: o.TokenizerOption = SHIPPED_MODEL,
    in_file_order: o.OrderOption = False,
    repeat: o.RepeatOption = False,
    columns: o.ColumnsOption = None,
    min_prompt: o.MinPromptOption = 1,
    max_prompt: o.MaxPromptOption = None,
    min_output: o.MinOutputOption = 1,
    max_output: o.MaxOutputOption = None,
    max_total: o.MaxTotalOption = None,
    burstiness: o.BurstinessOption = 4.0,
    url: o.UrlsOption = None,
    model: o.ModelOption = None,
    api_key: o.ApiKeyOption = None,
    timeout: o.TimeoutOption = 600.0,
    timings: o.TimingsOption = True,
    body: o.ExtraOption = None,
) -> None:
    """Send requests at a rate, whatever the server makes of them, and measure what comes back.

    Ctrl-C ends the run early and keeps what there is.
    """
    console = Console(highlight=False)
    with errors_told():
        if requests is None and duration is None:
            duration = 60.0
        chosen = RunOptions(
            target=o.target_of(url, api_key, timeout),
            trace=o.trace_of(
                trace,
                seed,
                LengthFilter(min_prompt, max_prompt, min_output, max_output, max_total),
                has_sessions=sessions,
                tokenizer=tokenizer,
                in_file_order=in_file_order,
                has_own_times=arrivals is ArrivalProcess.TRACE,
                is_repeated=repeat,
                columns=columns,
            ),
            arrivals=Arrivals(arrivals, rate, burstiness, seed),
            model=model,
            num_requests=requests,
            duration_seconds=duration,
            warmup_seconds=warmup,
            has_timings=timings,
            extra=o.extra_of(body),
        )
        records = output or Path(".sangam/loadtest") / time.strftime("%Y%m%d-%H%M%S.jsonl")
        if chosen.rate is not None and arrivals is ArrivalProcess.CLIPPED:
            console.print(f"clipped gaps: the true rate is {chosen.rate:.4g} requests/s")
        result = run(chosen, console, records)
        summary_path = records.with_suffix(".summary.json")
        write_json(summary_path, described(chosen, result))
        show_summary(result.summary, console)
        console.print(f"records: {records}\nsummary: {summary_path}", soft_wrap=True)
        if result.is_interrupted:
            raise typer.Exit(_INTERRUPTED_STATUS)
        if not result.summary.num_completed:
            raise SangamError("no request was answered")


def described(options: RunOptions, result: RunResult) -> dict[str, Any]:
    """The summary file: what was asked for, and what came."""
    asked = asdict(options)
    del asked["target"]["api_key"]
    return {
        "command": "sangam loadtest run",
        "python": sys.version.split()[0],
        "options": {**asked, "model": result.model},
        "true_rate": options.rate,
        "is_interrupted": result.is_interrupted,
        "summary": result.summary.to_json(),
    }
