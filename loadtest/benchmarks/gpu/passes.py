"""Times iterations of the engine: decode blocks, prefills, mixtures, by graph and eagerly.

Decides what is told of each, beside its floor, and the columns. Which iterations, ``sizes`` says;
how one is timed, ``one_pass``. Called by the parts.
"""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.one_pass import NotTimed, PassTime, plan_of, time_pass
from benchmarks.gpu.parts import Budget, Record, say
from benchmarks.gpu.roofline import floor_seconds
from benchmarks.iterations import Iteration, SkippableAttention
from sangam_loadtest.costs.gpus import Gpu
from sangam_loadtest.costs.shapes import ModelShape
from sangam_worker.engine import Engine
from sangam_worker.plan import Plan

_MOST_GRAPH_ERROR = 0.3
"""Random weights amplify roundings layer by layer; logits of other rows are off by 1 or more."""

COLUMNS = (
    "model", "engine", "launch", "prefill_tokens", "decode_blocks", "context_tokens",
    "total_ms", "without_attention_ms", "host_ms", "wall_ms", "floor_ms", "repeats",
)  # fmt: skip
"""The first nine as ``sangam loadtest fit`` reads them (``total_ms``: of the device; of an eager
pass with the gaps in which it waits for the host). ``host_ms``: until the pass is issued.
``wall_ms``: from the plan to the outcome on the host."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An engine and what its lines say of it.

    Attributes:
        name: the model's, without ``random:``. kind: of attention, by which the lines' engine is
            called. launch: ``eager`` or ``graph``. skippable: what can leave its attention out.
    """

    engine: Engine
    shape: ModelShape
    name: str
    kind: str
    launch: str
    is_fp8: bool = False
    skippable: SkippableAttention | None = None


def compare_with_eager(record: Record, timed: Timed, iteration: Iteration) -> None:
    """Replay a pass and issue it kernel by kernel: ``graph_error``, relative, of the logits.

    Raises:
        NotTimed: there is no graph for it, or its logits are others.
    """
    engine = timed.engine
    plan = plan_of(iteration, engine.model_config, engine.kv_pool.total_pages)
    engine.execute(plan)  # pages that nobody wrote are filled
    replayed = engine.replay(plan)
    if replayed is None:
        raise NotTimed(f"{iteration} has no graph")
    wanted = engine.forward(plan)[: len(replayed)].float()
    error = float((replayed.float() - wanted).norm() / wanted.norm())
    record["graph_error"] = error
    if not error < _MOST_GRAPH_ERROR:
        raise NotTimed(f"a replay of {iteration} differs from the eager pass by {error:.3g}")


def time_passes(
    record: Record,
    budget: Budget,
    timed: Timed,
    iterations: Sequence[Iteration],
    gpu: Gpu,
    num_repeats: int,
) -> None:
    """Add a line for each iteration to ``record["lines"]``, as many as the time allows."""
    lines: list[dict[str, Any]] = record.setdefault("lines", [])
    config, pool = timed.engine.model_config, timed.engine.kv_pool
    for number, iteration in enumerate(iterations):
        if budget.left_seconds <= 0:
            left_out = (f"{timed.launch} {_label(each)}" for each in iterations[number:])
            record.setdefault("cut_short", []).extend(left_out)
            return
        plan = plan_of(iteration, config, pool.total_pages)
        seen = time_pass(timed.engine, plan, num_repeats)
        line = _line(timed, iteration, seen, gpu)
        if timed.skippable is not None and iteration.prefill_tokens:
            line["without_attention_ms"] = _without_attention(timed, plan, num_repeats)
        lines.append(line)
        say(
            f"         {timed.name} {timed.launch:5} {_label(iteration):>22}: "
            f"{line['device_ms']:8.3f} ms (floor {line['floor_ms']:.3f}, wall {seen.wall:.3f})"
        )


def _line(timed: Timed, iteration: Iteration, seen: PassTime, gpu: Gpu) -> dict[str, Any]:
    floor = 1000 * floor_seconds(timed.shape, iteration, gpu, timed.is_fp8)
    told = asdict(iteration)
    del told["masks"]
    return {
        "model": timed.name,
        "engine": f"sangam-{timed.kind}",
        "launch": timed.launch,
        **told,
        "total_ms": seen.total if timed.launch == "eager" else seen.device,
        "without_attention_ms": None,
        "host_ms": seen.issue,
        "wall_ms": seen.wall,
        "device_ms": seen.device,
        "floor_ms": floor,
        "repeats": seen.repeats,
    }


def _without_attention(timed: Timed, plan: Plan, num_repeats: int) -> float:
    assert timed.skippable is not None
    timed.skippable.is_left_out = True
    try:
        return time_pass(timed.engine, plan, num_repeats).total
    finally:
        timed.skippable.is_left_out = False


def _label(iteration: Iteration) -> str:
    parts = [f"prefill {iteration.prefill_tokens}"] if iteration.prefill_tokens else []
    if iteration.decode_blocks:
        parts.append(f"{iteration.decode_blocks} x {iteration.context_tokens}")
    return " + ".join(parts)


def write_csv(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write lines as ``sangam loadtest fit`` reads them; a CPU's host issues nothing."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for line in lines:
            cells = {name: _cell(line[name]) for name in COLUMNS}
            writer.writerow(cells)


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "" if value is None else value
