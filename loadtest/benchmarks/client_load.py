"""How much load the client makes from one core: rates and requests in flight, server stubbed.

Each line is one open-loop run: what was offered, what the client managed, and whether it called
itself the bottleneck. ``make bench-client`` runs it.
"""

import argparse
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from benchmarks.stub_openai import serve_stub_openai
from sangam_loadtest.arrivals import ArrivalProcess, Arrivals
from sangam_loadtest.client.open_loop import Target
from sangam_loadtest.load import Load
from sangam_loadtest.run import RunOptions, allow_many_connections, run
from sangam_loadtest.summary import Summary
from sangam_loadtest.traces.source import TraceSpec

NUM_CHUNKS = 8


@contextmanager
def stub_server(seconds: float) -> Iterator[str]:
    """A stub in a process of its own, on the other core where there is one; yields its URL."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    server = context.Process(
        target=serve_stub_openai, args=(sending, seconds, NUM_CHUNKS), daemon=True
    )
    server.start()
    try:
        if not receiving.poll(30):
            raise TimeoutError("the stub server did not start")
        yield receiving.recv()
    finally:
        server.terminate()
        server.join(5)


def measured(rate: float, answer_seconds: float, run_seconds: float) -> Summary:
    """One open-loop run of synthetic ShareGPT against the stub."""
    with stub_server(answer_seconds) as url:
        arrivals = Arrivals(ArrivalProcess.POISSON, rate)
        load = Load(TraceSpec("sharegpt"), arrivals, duration_seconds=run_seconds)
        options = RunOptions(load, Target((url,), timeout_seconds=60.0))
        return run(options, Console(stderr=True), None, f"{rate:g}/s").summary


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 200, 400, 800])
    parser.add_argument("--answer-seconds", type=float, nargs="+", default=[1.0, 20.0])
    parser.add_argument("--run-seconds", type=float, default=10.0)
    parsed = parser.parse_args()
    allow_many_connections()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    table = Table("answer s", "offered/s", "answered", "failed", "in flight", "late", "lag P99 ms")
    for column in ("core", "over the stub's time ms: P50", "P99", "bottleneck"):
        table.add_column(column)
    for answer_seconds in parsed.answer_seconds:
        for rate in parsed.rates:
            summary = measured(rate, answer_seconds, parsed.run_seconds)
            table.add_row(*_row(summary, rate, answer_seconds))
    Console().print(table)


def _row(summary: Summary, rate: float, answer_seconds: float) -> list[str]:
    health, latency = summary.health, summary.distributions["latency"]
    assert health is not None
    least = answer_seconds * NUM_CHUNKS / (NUM_CHUNKS + 1)
    return [
        f"{answer_seconds:g}",
        f"{rate:g}",
        str(summary.num_completed),
        str(summary.num_failed),
        str(health.peak_in_flight),
        str(health.num_late),
        f"{health.lag_p99_seconds * 1000:.1f}",
        f"{health.cpu_share:.0%}",
        f"{(latency.p50 - least) * 1000:.1f}",
        f"{(latency.p99 - least) * 1000:.1f}",
        "yes" if summary.complaints else "no",
    ]


if __name__ == "__main__":
    main()
