"""What an answer leaves behind in the metrics."""

import pytest
from prometheus_client import generate_latest
from tests.router.builders import job
from tests.router.stub_worker import ConnectionBreaks, StubWorker
from tests.router.test_driver import LONG, Client, cluster, prefill_and_decode
from tests.router.test_driver_failures import fails_once

from sangam_core.errors import Unavailable


async def test_an_answer_counts_its_blocks_steps_and_tokens() -> None:
    prefill, decode = prefill_and_decode()
    async with cluster(prefill, decode) as (driven, _):
        await driven.run(job("hello", max_tokens=96), Client().emit)
        text = generate_latest(driven._metrics.registry).decode()
    for line in (
        'sangam_requests_total{outcome="stop"} 1.0',
        "sangam_prompt_tokens_total 5.0",
        f"sangam_completion_tokens_total {len(LONG)}.0",
        "sangam_blocks_total 3.0",
        "sangam_request_latency_seconds_count 1.0",
        "sangam_first_token_latency_seconds_count 1.0",
        "sangam_prefill_queueing_seconds_count 3.0",
        "sangam_prefill_seconds_count 3.0",
        "sangam_decode_seconds_count 3.0",
        "sangam_kv_transfer_seconds_count 3.0",
        "sangam_kv_transfer_bytes_total 3000.0",
        "sangam_tokens_per_step_count 12.0",
        'sangam_block_dispatches_total{role="decode",stage="decode"} 3.0',
        "sangam_requests_in_flight 0.0",
        "sangam_requests_waiting 0.0",
    ):
        assert f"{line}\n" in text, line


async def test_losses_refusals_and_failures_count_by_their_reason() -> None:
    worker = StubWorker(before_pass=fails_once(0, ConnectionBreaks))
    worker.refusals.append("no_pages")
    async with cluster(worker, limits={"max_lost": 0}) as (driven, _):
        with pytest.raises(Unavailable):
            await driven.run(job(), Client().emit)
        text = generate_latest(driven._metrics.registry).decode()
    for line in (
        'sangam_retries_total{reason="no_pages"} 1.0',
        'sangam_retries_total{reason="lost"} 1.0',
        'sangam_requests_total{outcome="Unavailable"} 1.0',
        "sangam_request_latency_seconds_count 0.0",
    ):
        assert f"{line}\n" in text, line
