"""Times iterations of the engine: decode blocks, prefills, mixtures, by graph and eagerly.

Decides how an iteration is made (a plan by hand, the same one again and again: the engine keeps
nothing but pages between two) and which of its times is told. Which iterations, ``sizes`` says.
Called by the parts.
"""

import csv
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.gpu.parts import Budget, Record, say
from benchmarks.gpu.roofline import floor_seconds
from benchmarks.gpu.timing import delay_device, settle
from benchmarks.iterations import BLOCK_LENGTH, Iteration, SkippableAttention
from sangam_core.decoding import Decoding, EosRule, Unmasking, UnmaskingRule
from sangam_core.errors import SangamError
from sangam_core.geometry import PAGE_TOKENS
from sangam_core.wire import BlockKey
from sangam_loadtest.costs.gpus import Gpu
from sangam_loadtest.costs.shapes import ModelShape
from sangam_worker.engine import Engine
from sangam_worker.models.description import ModelConfig
from sangam_worker.plan import Pass, Plan

_ONE_A_PASS = Decoding(
    unmasking=Unmasking(rule=UnmaskingRule.FIXED, steps=BLOCK_LENGTH), eos_rule=EosRule.IGNORE
)
_LEAST_REPEATS = 3
_ENOUGH_SECONDS = 0.7
"""Longer passes are repeated less often."""

COLUMNS = (
    "model", "engine", "launch", "prefill_tokens", "decode_blocks", "context_tokens",
    "total_ms", "without_attention_ms", "host_ms", "wall_ms", "floor_ms", "repeats",
)  # fmt: skip
"""The first nine as ``sangam loadtest fit`` reads them (``total_ms``: of the device; of an eager
pass with the gaps in which it waits for the host). ``host_ms``: until the pass is issued.
``wall_ms``: from the plan to the outcome on the host."""


class NotTimed(SangamError):
    """A pass failed, so that its time means nothing."""


@dataclass(frozen=True, slots=True)
class PassTime:
    """Medians, in milliseconds.

    Attributes:
        device: of the device, the host out of its way. total: of the device when it is given the
            pass while idle. issue: until ``launch`` returned. wall: until the outcome was there.
    """

    device: float
    total: float
    issue: float
    wall: float
    repeats: int


def plan_of(iteration: Iteration, config: ModelConfig, total_pages: int, seed: int = 0) -> Plan:
    """The iteration on pages in any order. Every block's masks come first in it."""
    random = Random(seed)
    pages = random.sample(range(total_pages), iteration.num_pages)
    passes = []
    for index in range(iteration.decode_blocks):
        tokens = iteration.context_tokens
        own = tuple(pages.pop() for _ in range(-(-tokens // PAGE_TOKENS)))
        block = range(tokens - BLOCK_LENGTH, tokens)
        passes.append(_pass(f"decode-{index}", block, block, own, iteration.masks, random, config))
    if iteration.prefill_tokens:
        rows = range(iteration.prefill_tokens)
        block = rows[-BLOCK_LENGTH:]
        item = _pass("prefill", rows, block, tuple(pages), BLOCK_LENGTH, random, config)
        passes.append(item)
    num_decode_tokens = BLOCK_LENGTH * iteration.decode_blocks
    return Plan(1, tuple(passes), num_decode_tokens, iteration.prefill_tokens)


def _pass(
    name: str,
    rows: range,
    block: range,
    pages: tuple[int, ...],
    num_masks: int,
    random: Random,
    config: ModelConfig,
) -> Pass:
    # Step 1, as no first position is forced then (Dream): every mask wants its logits.
    masked = tuple(block[:num_masks])
    tokens = [random.randrange(config.vocab_size) for _ in rows]
    for position in masked:
        tokens[position - rows.start] = config.mask_id
    return Pass(
        key=BlockKey(request_id=name, block=0),
        positions=rows,
        tokens=tokens,
        sees=block.stop,
        total_tokens=block.stop,
        pages=pages,
        block=block,
        block_index=0,
        step=1,
        masked=masked,
        initial_masks=BLOCK_LENGTH,
        carry=0.0,
        decoding=_ONE_A_PASS,
        is_whole_sequence=len(rows) == block.stop,
    )


def time_pass(engine: Engine, plan: Plan, num_repeats: int) -> PassTime:
    """Time a plan after two runs that do not count.

    Raises:
        NotTimed: its logits are not numbers.
    """
    for _ in range(2):
        once = _run(engine, plan, has_head_start=False)
    fitting = int(_ENOUGH_SECONDS / max(once.wall, 1e-6))
    repeats = max(min(num_repeats, _LEAST_REPEATS), min(num_repeats, fitting))
    plain = [_run(engine, plan, has_head_start=False) for _ in range(repeats)]
    ahead = [_run(engine, plan, has_head_start=True) for _ in range(repeats)]
    return PassTime(
        device=1000 * median(each.device for each in ahead),
        total=1000 * median(each.device for each in plain),
        issue=1000 * median(each.issue for each in plain),
        wall=1000 * median(each.wall for each in plain),
        repeats=repeats,
    )


@dataclass(frozen=True, slots=True)
class _Once:
    device: float
    issue: float
    wall: float


def _run(engine: Engine, plan: Plan, *, has_head_start: bool) -> _Once:
    device = engine.kv_pool.device
    settle(device)
    if has_head_start:
        delay_device(device)
    started = time.perf_counter()
    launched = engine.launch(plan)
    issued = time.perf_counter()
    outcome = launched.outcome()
    ended = time.perf_counter()
    errors = [item.error for item in outcome.passes if item.error is not None]
    if errors or len(outcome.passes) != len(plan.passes):
        raise NotTimed("; ".join(errors) or "not every pass has an outcome")
    on_device = launched.device_seconds
    wall = ended - started
    return _Once(wall if on_device is None else on_device, issued - started, wall)


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
