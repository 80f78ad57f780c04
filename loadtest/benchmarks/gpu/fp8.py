"""Passes with FP8 products beside the same with bf16 ones, as ``sangam loadtest fit`` reads them.

Decides which passes and the columns. Called by the parts.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.engines import Place, load_graphs
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
    bf16_lines: Sequence[Mapping[str, Any]],
    num_repeats: int,
) -> None:
    """A line for each iteration; decodes by graph, prefills eagerly, as a worker runs them.

    Args:
        bf16_lines: the same passes in bf16, as far as they were measured before.
    """
    lines: list[dict[str, Any]] = record.setdefault("lines", [])
    known = {_passes_of(line): line["total_ms"] for line in bf16_lines}
    total_pages = max(each.num_pages for each in iterations)
    buckets = [each.decode_blocks for each in iterations if not each.prefill_tokens]
    timed = load_graphs(place, model, total_pages, buckets, "fp8")
    left_out = record.setdefault("cut_short", [])
    for iteration in iterations:
        line = {
            "model": timed.name,
            "engine": f"sangam-{timed.kind}",
            "launch": "eager" if iteration.prefill_tokens else "graph",
            "prefill_tokens": iteration.prefill_tokens,
            "decode_blocks": iteration.decode_blocks,
            "context_tokens": iteration.context_tokens,
        }
        if budget.left_seconds <= 0:
            left_out.append(str(iteration))
            continue
        plan = plan_of(iteration, timed.engine.model_config, total_pages)
        seen = time_pass(timed.engine, plan, num_repeats)
        fp8 = seen.total if iteration.prefill_tokens else seen.device
        bf16 = known.get(_passes_of(line))
        faster = None if bf16 is None else bf16 / fp8
        lines.append(line | {"bf16_ms": bf16, "fp8_ms": fp8, "times_faster": faster})
        say(f"         {lines[-1]}")


def _passes_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells one measured pass from another."""
    return tuple(line[key] for key in COLUMNS[2:6])


def write_csv(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write the lines of which both are known."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for line in lines:
            if line["bf16_ms"] is not None:
                writer.writerow({key: line[key] for key in COLUMNS})
