"""Passes with FP8 products beside the same with bf16 ones, as ``sangam loadtest fit`` reads them.

Decides which passes and the columns. Called by the parts.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.engines import Place, load_graphs, name_of
from benchmarks.gpu.one_pass import plan_of, time_pass
from benchmarks.gpu.parts import Budget, Record, say
from benchmarks.iterations import Iteration

COLUMNS = (
    "model", "engine", "launch", "prefill_tokens", "decode_blocks", "context_tokens",
    "bf16_ms", "fp8_ms",
)  # fmt: skip


def time_fp8(
    record: Record,
    budget: Budget,
    place: Place,
    model: str,
    iterations: Sequence[Iteration],
    num_repeats: int,
) -> None:
    """A line for each iteration; decodes by graph, prefills eagerly, as a worker runs them."""
    lines: list[dict[str, Any]] = record.setdefault("lines", [])
    seen = {
        quantization: _times(record, budget, place, model, iterations, num_repeats, quantization)
        for quantization in ("none", "fp8")
    }
    for iteration in iterations:
        if iteration not in seen["fp8"]:
            continue
        bf16, fp8 = seen["none"][iteration], seen["fp8"][iteration]
        line = {
            "model": name_of(model),
            "engine": f"sangam-{place.attention.rpartition('-')[2]}",
            "launch": "eager" if iteration.prefill_tokens else "graph",
            "prefill_tokens": iteration.prefill_tokens,
            "decode_blocks": iteration.decode_blocks,
            "context_tokens": iteration.context_tokens,
            "bf16_ms": bf16,
            "fp8_ms": fp8,
            "times_faster": bf16 / fp8,
        }
        lines.append(line)
        say(f"         {line}")


def _times(
    record: Record,
    budget: Budget,
    place: Place,
    model: str,
    iterations: Sequence[Iteration],
    num_repeats: int,
    quantization: str,
) -> dict[Iteration, float]:
    total_pages = max(each.num_pages for each in iterations)
    buckets = [each.decode_blocks for each in iterations if not each.prefill_tokens]
    timed = load_graphs(place, model, total_pages, buckets, quantization)
    times: dict[Iteration, float] = {}
    for number, iteration in enumerate(iterations):
        if budget.left_seconds <= 0:
            record["cut_short"] = [f"{quantization} {each}" for each in iterations[number:]]
            break
        plan = plan_of(iteration, timed.engine.model_config, total_pages)
        seen = time_pass(timed.engine, plan, num_repeats)
        times[iteration] = seen.total if iteration.prefill_tokens else seen.device
    return times


def write_csv(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write the lines."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for line in lines:
            writer.writerow({key: line[key] for key in COLUMNS})
