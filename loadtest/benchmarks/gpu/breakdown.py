"""Where a pass's time goes on the device: torch's profiler, kernels put into a few classes.

Decides the classes, by the kernels' names, and what of an operator's floor belongs to each. Called
by the parts; says what dominates where a goal is missed.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.one_pass import plan_of
from benchmarks.gpu.parts import Budget, Record, say
from benchmarks.gpu.passes import Timed
from benchmarks.gpu.roofline import operators_of
from benchmarks.gpu.timing import settle
from benchmarks.iterations import Iteration
from sangam_loadtest.costs.gpus import Gpu

_CLASSES = (
    ("sampler", ("read_row",)),
    ("attention", ("prefillwithkv", "batchprefill", "decodewithkv", "mergestate", "attention",
                   "attend_tile", "put_together")),
    ("small kernels", ("norm", "rope", "rotary", "silu", "act_and_mul", "append", "quant")),
    ("products", ("gemm", "nvjet", "cutlass", "cublas", "splitk", "xmma", "matmul", "aten::mm",
                  "addmm", "mkldnn", "linear")),
    ("copies", ("memcpy", "memset", "copy", "index", "gather", "scatter", "elementwise")),
)  # fmt: skip
"""The first class one of whose words is in the name. FA3's kernels are CUTLASS's by name."""

_FLOOR_CLASS = {
    "attention": "attention",
    "small kernels": "small kernels",
    "sampler": "sampler",
}
"""Of the floor's operators; all others are products."""

_NUM_RUNS = 3
_NUM_NAMES = 14


def class_of(kernel: str) -> str:
    """The class of a kernel by its name, ``other`` for an unknown one."""
    name = kernel.lower()
    found = (each for each, words in _CLASSES if any(word in name for word in words))
    return next(found, "other")


def profile_passes(
    record: Record, budget: Budget, timed: Timed, iterations: list[Iteration], gpu: Gpu
) -> None:
    """Add a breakdown of each iteration to ``record["passes"]``, milliseconds by class."""
    passes: list[dict[str, Any]] = record.setdefault("passes", [])
    for number, iteration in enumerate(iterations):
        if budget.left_seconds <= 0:
            record["cut_short"] = [str(each) for each in iterations[number:]]
            return
        passes.append(_profiled(timed, iteration, gpu))
        say(f"         {timed.name} {timed.launch} {iteration}: {passes[-1]['by_class_ms']}")


def _profiled(timed: Timed, iteration: Iteration, gpu: Gpu) -> dict[str, Any]:
    engine = timed.engine
    plan = plan_of(iteration, engine.model_config, engine.kv_pool.total_pages)
    device = engine.kv_pool.device
    engine.execute(plan)
    settle(device)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [ProfilerActivity.CUDA]
    with profile(activities=activities) as profiled:
        for _ in range(_NUM_RUNS):
            engine.execute(plan)
        settle(device)
    by_name = dict(_kernels(profiled, is_cuda=device.type == "cuda"))
    by_class: dict[str, float] = defaultdict(float)
    for name, milliseconds in by_name.items():
        by_class[class_of(name)] += milliseconds
    longest = sorted(by_name, key=lambda name: -by_name[name])[:_NUM_NAMES]
    return {
        "model": timed.name,
        "launch": timed.launch,
        "prefill_tokens": iteration.prefill_tokens,
        "decode_blocks": iteration.decode_blocks,
        "context_tokens": iteration.context_tokens,
        "by_class_ms": {name: round(value, 3) for name, value in by_class.items()},
        "floor_ms": _floors(timed, iteration, gpu),
        "longest_ms": {name[:120]: round(by_name[name], 4) for name in longest},
    }


def _kernels(profiled: profile, *, is_cuda: bool) -> Iterator[tuple[str, float]]:
    """Milliseconds a pass of each kernel (on a CPU: of each operator)."""
    for event in profiled.key_averages():
        if is_cuda and event.device_type != DeviceType.CUDA:
            continue
        microseconds = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        yield event.key, microseconds / 1000 / _NUM_RUNS


def _floors(timed: Timed, iteration: Iteration, gpu: Gpu) -> dict[str, float]:
    floors: dict[str, float] = defaultdict(float)
    for operator in operators_of(timed.shape, iteration, timed.is_fp8):
        name = _FLOOR_CLASS.get(operator.name, "products")
        floors[name] += 1000 * operator.seconds(gpu)
    return {name: round(value, 3) for name, value in floors.items()}
