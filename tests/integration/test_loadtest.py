"""A load test of a real cluster with the shipped model's questions: answers are checked."""

import asyncio
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.integration.cluster import RunningCluster, running_cluster
from tests.integration.knobs import MODEL, SEED

from sangam_loadtest.arrivals import Arrivals
from sangam_loadtest.client.open_loop import Target
from sangam_loadtest.load import Load
from sangam_loadtest.records import read_records
from sangam_loadtest.run import RunOptions, RunResult, run
from sangam_loadtest.traces.length_filter import LengthFilter
from sangam_loadtest.traces.source import TraceSpec
from sangam_router.local.roles import RoleCounts

pytestmark = pytest.mark.integration

RATE = 3.0
NUM_REQUESTS = 30
LEAST_ACCURACY = 0.9
"""On two-digit sums, of which the model's card says 98 %, and on about 20 of them."""
TIMINGS = ("queueing_seconds", "prefill_seconds", "decode_seconds", "transfer_seconds")


async def loaded(
    cluster: RunningCluster, trace: TraceSpec, num_requests: int, path: Path
) -> RunResult:
    """A run beside the cluster, which this loop supervises."""
    arrivals = Arrivals(rate=RATE, seed=SEED)
    load = Load(trace, arrivals, num_requests=num_requests, warmup_seconds=2.0)
    target = Target(tuple(cluster.local.public_urls), timeout_seconds=90.0)
    options = RunOptions(load, target)
    return await asyncio.to_thread(run, options, Console(quiet=True), path)


@pytest.mark.timeout(300)
async def test_questions_are_answered_right_under_load_and_time_is_accounted_for(
    tmp_path: Path,
) -> None:
    async with running_cluster(tmp_path, roles=RoleCounts(prefill=1, colocated=1)) as cluster:
        asked = await loaded(
            cluster, TraceSpec("questions", SEED), NUM_REQUESTS, tmp_path / "q.jsonl"
        )
        made_up = TraceSpec("sharegpt", SEED, LengthFilter(max_prompt=300, max_output=64))
        sized = await loaded(cluster, made_up, 8, tmp_path / "s.jsonl")
        await cluster.assert_idle()

    for summary in (asked.summary, sized.summary):
        assert summary.errors == {}
        assert set(summary.distributions) >= {"latency", "queueing", "prefill", "decode"}
    assert asked.summary.num_requests >= NUM_REQUESTS * 0.5
    if MODEL == "small":
        assert asked.summary.num_checked_answers == asked.summary.num_requests
        assert asked.summary.accuracy_of_task["sum2"] >= LEAST_ACCURACY

    for record in read_records(tmp_path / "q.jsonl"):
        assert record.num_blocks == len(record.placements) >= 1
        assert record.latency_seconds is not None
        assert record.server_latency_seconds is not None
        assert record.server_latency_seconds <= record.latency_seconds
        parts = sum(getattr(record, name) for name in TIMINGS)
        assert 0 < parts <= record.latency_seconds * 1.05
        assert record.prefill_queueing_seconds is not None
        assert record.decode_queueing_seconds is not None
        waited = record.prefill_queueing_seconds + record.decode_queueing_seconds
        assert record.queueing_seconds == pytest.approx(waited, abs=1e-5)
        assert len(record.commit_counts) == record.num_blocks
        assert sum(len(passes) for passes in record.commit_counts) == record.num_steps
        assert sum(map(sum, record.commit_counts)) >= record.output_tokens
    lines = (tmp_path / "s.jsonl").read_text().splitlines()
    wanted = [json.loads(line) for line in lines]
    assert all(entry["output_tokens"] <= 64 for entry in wanted)
    assert all(4 <= entry["prompt_tokens"] <= 300 for entry in wanted)
