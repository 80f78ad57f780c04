"""One iteration, made by hand and timed on the engine.

Decides how it is made (the same plan again and again: the engine keeps nothing but pages between
two) and which of its times is told. Called by ``passes`` and by whoever needs a plan.
"""

import time
from dataclasses import dataclass
from random import Random
from statistics import median

from benchmarks.gpu.timing import delay_device, settle
from benchmarks.iterations import BLOCK_LENGTH, Iteration
from sangam_core.decoding import Decoding, EosRule, Unmasking, UnmaskingRule
from sangam_core.errors import SangamError
from sangam_core.geometry import PAGE_TOKENS
from sangam_core.wire import BlockKey
from sangam_worker.engine import Engine
from sangam_worker.models.description import ModelConfig
from sangam_worker.plan import Pass, Plan

_ONE_A_PASS = Decoding(
    unmasking=Unmasking(rule=UnmaskingRule.FIXED, steps=BLOCK_LENGTH), eos_rule=EosRule.IGNORE
)
_LEAST_REPEATS = 3
_ENOUGH_SECONDS = 0.7
"""Longer passes are repeated less often."""


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
