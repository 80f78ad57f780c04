"""A decode step at batch 1: the plain PyTorch loop of Fast-dLLM against a worker's engine.

Decides what a step is, alike for both: what one pass more adds to the answer of one block, from
ids to ids (for the engine with its scheduler, packing and sampling). Called by the parts.
"""

from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

from baselines.llada_dense import DenseLlada
from benchmarks.contenders import plain_loop, through_engine
from benchmarks.gpu.parts import Budget, Record, say
from benchmarks.rounds import Measurement
from benchmarks.workloads import BLOCK_LENGTH, Workload
from sangam_core.decoding import Decoding, EosRule, Unmasking, UnmaskingRule
from sangam_worker.engine import Engine

_FEW_PASSES, _MANY_PASSES = 2, BLOCK_LENGTH
_NUM_ROUNDS = 3


def time_steps(
    record: Record, budget: Budget, engine: Engine, dense: DenseLlada, context_tokens: int
) -> None:
    """Milliseconds of a step of both, and the ratio; the median of alternating rounds."""
    random = Random(0)
    below = engine.model_config.mask_id
    prompt = [random.randrange(below) for _ in range(context_tokens - BLOCK_LENGTH)]
    few, many = (_workload(engine, prompt, steps) for steps in (_FEW_PASSES, _MANY_PASSES))

    def plain(workload: Workload) -> Measurement:
        return plain_loop(dense, workload, workload.prompts)[0]

    def ours(workload: Workload) -> Measurement:
        return through_engine(engine, workload, workload.prompts, 1)[0]

    sides: dict[str, Callable[[Workload], Measurement]] = {"plain_loop": plain, "engine": ours}
    steps: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(_NUM_ROUNDS):
        for name, run in sides.items():
            run(few)  # warm: kernels are loaded, memory is there
            added = run(many).wall_seconds - run(few).wall_seconds
            steps[name].append(1000 * added / (_MANY_PASSES - _FEW_PASSES))
        if budget.left_seconds <= 0:
            break
    found: dict[str, Any] = {f"{name}_ms": median(each) for name, each in steps.items()}
    record |= found | {"rounds": steps, "context_tokens": context_tokens}
    record["ratio"] = found["plain_loop_ms"] / found["engine_ms"]
    say(f"         {found}, ratio {record['ratio']:.2f}")


def _workload(engine: Engine, prompt: list[int], num_passes: int) -> Workload:
    """One block of one request, in so many passes, the prefill among them."""
    unmasking = Unmasking(rule=UnmaskingRule.FIXED, steps=num_passes)
    decoding = Decoding(unmasking=unmasking, eos_rule=EosRule.IGNORE)
    return Workload("step", engine.model_config.name, [prompt], 1, 1, decoding, 1.0)
