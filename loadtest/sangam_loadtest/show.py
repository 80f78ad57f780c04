"""How a run looks in a terminal: a progress bar while it goes on, tables when it is over."""

import asyncio
import time
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from sangam_core.counted import counted
from sangam_loadtest.client.open_loop import Progress
from sangam_loadtest.summary import Summary

_REFRESH_SECONDS = 0.25
_LINE_SECONDS = 10.0


async def show_progress(progress: Progress, console: Console, label: str) -> None:
    """Show a run's counters until cancelled: a bar on a terminal, else a line now and then."""
    if not console.is_terminal:
        await _show_lines(progress, console, label)
        return
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[told]}"),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    with bar:
        task = bar.add_task(label, total=None, told="")
        while True:
            bar.update(
                task,
                total=progress.num_requests or None,
                completed=progress.num_done,
                told=_told(progress),
                refresh=True,
            )
            await asyncio.sleep(_REFRESH_SECONDS)


async def _show_lines(progress: Progress, console: Console, label: str) -> None:
    started = time.monotonic()
    while True:
        await asyncio.sleep(_LINE_SECONDS)
        seconds = time.monotonic() - started
        done = f"{progress.num_done} of {progress.num_requests}"
        console.print(f"{label}: {seconds:.0f} s, {done} done, {_told(progress)}")


def _told(progress: Progress) -> str:
    return f"{progress.watch.in_flight} in flight, {progress.num_failed} failed"


def show_summary(summary: Summary, console: Console) -> None:
    """Print a run's summary, the client's complaints last."""
    if summary.distributions:
        console.print(_latencies(summary))
    for line in _lines(summary):
        console.print(line, soft_wrap=True)
    for complaint in summary.complaints:
        warning = f"the client was a bottleneck, so these are not the server's numbers: {complaint}"
        console.print(Text(warning, style="yellow"), soft_wrap=True)


def _latencies(summary: Summary) -> Table:
    table = Table("seconds", "mean", "P50", "P90", "P99", "max", "of", box=None, padding=(0, 2))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, d in summary.distributions.items():
        values = (f"{value:.3f}" for value in (d.mean, d.p50, d.p90, d.p99, d.max))
        table.add_row(name.replace("_", " "), *values, str(d.count))
    return table


def _lines(summary: Summary) -> Iterable[str]:
    more = [f"{summary.num_warmup} of the warm-up not counted"] if summary.num_warmup else []
    if summary.num_interrupted:
        more.append(f"{summary.num_interrupted} interrupted")
    answered = f"{summary.num_completed} of {counted(summary.num_requests, 'request')} answered"
    yield ", ".join([answered, *more])
    if summary.completed_rate is not None:
        offered = f"{summary.offered_rate:.3g}" if summary.offered_rate else "?"
        yield (
            f"offered {offered} requests/s, answered {summary.completed_rate:.3g} requests/s, "
            f"{summary.output_tokens_rate:.4g} tokens/s"
        )
    for kind, count in summary.errors.items():
        yield f"failed: {count} x {kind} ({summary.error_messages.get(kind, 'no message')})"
    if summary.accuracy is not None:
        tasks = ", ".join(f"{task} {share:.1%}" for task, share in summary.accuracy_of_task.items())
        yield f"right answers: {summary.accuracy:.1%} of {summary.num_checked_answers} ({tasks})"
    if summary.num_block_retries:
        started = "was started" if summary.num_block_retries == 1 else "were started"
        yield f"{counted(summary.num_block_retries, 'block')} {started} again on another worker"
    if (health := summary.health) is not None:
        yield (
            f"client: at most {health.peak_in_flight} in flight, {health.num_late} sent late, loop "
            f"lag P99 {health.lag_p99_seconds * 1000:.1f} ms, {health.cpu_share:.0%} of a core"
        )
