"""Builders: a run's records as a small queueing model gives them, and such runs on disk.

Each request waits for one of a pool of prefill servers, then for one of a pool of decode places, in
order of arrival; service times grow with lengths. No system's numbers, but shapes that a report
must show: queues that grow past saturation, long tails, steps that follow the output's length.
"""

import heapq
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from sangam_loadtest.records import RequestRecord, write_records
from sangam_loadtest.report.runs import Run, run_of
from sangam_loadtest.run_files import RunLabel

BLOCK_TOKENS = 32


def label(**changes: Any) -> RunLabel:
    """A full label."""
    usual = RunLabel("simulated", "4P4D", "llada-8b", "sharegpt", 6.0, "paper", 1024)
    return replace(usual, **changes)


def records(
    rate: float = 6.0,
    num_requests: int = 400,
    *,
    num_prefill: int = 4,
    num_places: int = 64,
    slowness: float = 1.0,
    seed: int = 0,
) -> list[RequestRecord]:
    """Records of a run at a rate, on pools of prefill servers and decode places."""
    draw = np.random.default_rng(seed)
    due = np.cumsum(draw.exponential(1 / rate, num_requests))
    prompts = draw.integers(20, 2000, num_requests)
    outputs = np.clip(draw.gamma(1.6, 190, num_requests), 8, 1024).astype(int)
    prefill_free, decode_free = [0.0] * num_prefill, [0.0] * num_places
    found = []
    for index, (at, prompt, output) in enumerate(zip(due, prompts, outputs, strict=True)):
        num_blocks = -(-int(output) // BLOCK_TOKENS)
        commits = [_commits(draw) for _ in range(num_blocks)]
        steps = sum(len(block) for block in commits)
        prefill = slowness * num_blocks * (prompt + 1024) * 3.0e-5
        decode = (
            slowness * (steps - num_blocks) * 0.028 * draw.uniform(0.9, 1.2) * (0.6 + rate / 12)
        )
        transfer = num_blocks * 0.011
        prefill_queueing = _waited(prefill_free, at, prefill)
        ready = at + prefill_queueing + prefill + transfer
        decode_queueing = _waited(decode_free, ready, decode)
        rest = num_blocks * 0.004 + draw.exponential(0.01)
        parts = (prefill_queueing, prefill, transfer, decode_queueing, decode)
        found.append(
            RequestRecord(
                index,
                float(at),
                float(at),
                int(prompt),
                int(output),
                latency_seconds=float(sum(parts) + rest),
                first_token_seconds=float(prefill_queueing + prefill / num_blocks),
                queueing_seconds=float(prefill_queueing + decode_queueing),
                prefill_queueing_seconds=float(prefill_queueing),
                decode_queueing_seconds=float(decode_queueing),
                prefill_seconds=float(prefill),
                decode_seconds=float(decode),
                transfer_seconds=float(transfer),
                num_blocks=num_blocks,
                num_steps=steps,
                placements=[["worker-0", "worker-5"]] * num_blocks,
                commit_counts=commits,
            )
        )
    return found


def _commits(draw: np.random.Generator) -> list[int]:
    """Tokens that each pass of a block commits."""
    left, found = BLOCK_TOKENS, []
    while left:
        count = min(left, 1 + int(draw.poisson(2.2)))
        found.append(count)
        left -= count
    return found


def _waited(free: list[float], at: float, service: float) -> float:
    """Takes the server that is free first; returns the wait for it."""
    start = max(at, heapq.heappop(free))
    heapq.heappush(free, start + service)
    return start - at


POOLS = {
    "8C": (6, 60, 1.12),
    "5P3C": (6, 48, 1.0),
    "4P4D": (4, 56, 0.92),
    "5P3D": (4, 28, 0.9),
    "6P2D": (6, 22, 0.88),
}
"""Prefill servers, decode places and slowness of the paper's configurations, made up."""


def run(configuration: str = "4P4D", rate: float = 6.0, num: int = 400, **changes: Any) -> Run:
    """A run in memory. Changes are of the label."""
    told = label(configuration=configuration, rate=rate, **changes)
    return run_of(told, records_of(told, num), {"label": asdict(told)})


def records_of(told: RunLabel, num: int = 400) -> list[RequestRecord]:
    """Records that suit a label: each model, trace and tau has its own speed."""
    num_prefill, num_places, slowness = POOLS[told.configuration or "4P4D"]
    slowness *= {"dream-7b": 0.8}.get(told.model or "", 1.0)
    slowness *= {"arxiv": 0.9}.get(told.trace or "", 1.0)
    doublings = np.log2((told.tau_tokens or 1024) / 1024)
    slowness *= 1 + 0.12 * doublings if doublings > 0 else 1 - 0.5 * doublings
    slowness *= {"sangam": 0.6}.get(told.system or "", 1.0)
    return records(
        told.rate or 6.0,
        num,
        num_prefill=num_prefill,
        num_places=num_places,
        slowness=float(slowness),
        seed=7,
    )


def write_run(
    path: Path, rows: Iterable[RequestRecord], told: RunLabel | None = None, **summary: Any
) -> Path:
    """Records on disk, with a summary where there is a label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_records(path, rows)
    if told is not None:
        content = {"label": asdict(told), "true_rate": told.rate, **summary}
        path.with_suffix(".summary.json").write_text(json.dumps(content))
    return path


def sweep(
    configurations: Sequence[str] = tuple(POOLS),
    rates: Sequence[float] = (2, 4, 6, 8),
    num: int = 400,
    **changes: Any,
) -> list[Run]:
    """Runs of configurations at rates."""
    return [run(name, rate, num, **changes) for name in configurations for rate in rates]
