"""The two sides of the throughput benchmark: the plain loop, and the engine in a closed loop.

Decides what is timed (everything from prompt ids to answer ids; nothing of loading) and what counts
as an answer. ``engine_throughput`` decides who runs when.
"""

import time
from collections.abc import Sequence

import torch

from baselines import fast_dllm
from baselines.llada_dense import DenseLlada, Shape
from benchmarks.in_process import ClosedLoop, CountingEngine
from benchmarks.rounds import Measurement
from benchmarks.workloads import BLOCK_LENGTH, Workload
from sangam_core.decoding import Decoding, EosRule, UnmaskingRule
from sangam_worker.engine import Engine
from sangam_worker.models.config import resolve_model
from sangam_worker.models.random_models import RANDOM_PREFIX, random_config
from sangam_worker.scheduler import Scheduler
from sangam_worker.settings import WorkerSettings
from sangam_worker.weights import random_weights

TAU_TOKENS: int = WorkerSettings.model_fields["tau_tokens_colocated"].default

Answers = list[list[int]]
"""The answer tokens of each prompt, up to the EOS."""


def dense_model(model: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> DenseLlada:
    """The plain loop's model with the weights that the engine has under that name.

    Only random models go to another device or dtype.
    """
    if not model.startswith(RANDOM_PREFIX):
        return DenseLlada.from_folder(resolve_model(model))
    config = random_config(model)
    weights = random_weights(config, dtype, torch.device(device))
    tensors = {}
    for name, slot in weights.slots.items():
        group = weights.outer if slot.layer is None else weights.layers[slot.layer]
        rows = group[slot.parameter][slot.first_row : slot.first_row + slot.shape[0]]
        tensors[name] = rows
    shape = Shape(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        max_tokens=config.max_sequence_tokens,
        mask_id=config.mask_id,
    )
    return DenseLlada(shape, tensors)


def plain_loop(
    model: DenseLlada, workload: Workload, prompts: Sequence[Sequence[int]]
) -> tuple[Measurement, Answers]:
    """Answer the prompts one after another with Fast-dLLM's loop."""
    decoding = _plain_decoding(workload.decoding)
    length = workload.num_blocks * BLOCK_LENGTH
    wall, cpu = time.perf_counter(), time.process_time()
    made = [fast_dllm.generate(model, p, length, BLOCK_LENGTH, decoding) for p in prompts]
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    answers = [
        _answer(item.ids, prompt, workload) for item, prompt in zip(made, prompts, strict=True)
    ]
    num_passes = sum(item.num_passes for item in made)
    return Measurement(sum(map(len, answers)), num_passes, num_passes, wall, cpu), answers


def through_engine(
    engine: Engine, workload: Workload, prompts: Sequence[Sequence[int]], concurrency: int
) -> tuple[Measurement, Answers]:
    """Answer the prompts through scheduler and engine, ``concurrency`` of them at a time."""
    counting = CountingEngine(engine)
    config, total_pages = engine.model_config, engine.kv_pool.total_pages
    loop = ClosedLoop(
        counting,
        Scheduler(mask_id=config.mask_id, total_pages=total_pages, tau_tokens=TAU_TOKENS),
        mask_id=config.mask_id,
        vocab_size=config.vocab_size,
        num_blocks=workload.num_blocks,
        block_length=BLOCK_LENGTH,
        decoding=workload.decoding,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    served = loop.serve(prompts, concurrency)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    answers = [
        _answer(item.ids, prompt, workload) for item, prompt in zip(served, prompts, strict=True)
    ]
    num_passes = sum(item.num_passes for item in served)
    return Measurement(
        sum(map(len, answers)), num_passes, counting.num_iterations, wall, cpu
    ), answers


def _plain_decoding(decoding: Decoding) -> fast_dllm.Decoding:
    """The same rule in the plain loop's terms. It is given the engine's end of answer as well."""
    unmasking = decoding.unmasking
    value = float(unmasking.steps or BLOCK_LENGTH)
    if unmasking.rule is UnmaskingRule.THRESHOLD:
        value = unmasking.threshold
    eos = fast_dllm.Eos.END if decoding.eos_rule is EosRule.END else fast_dllm.Eos.IGNORE
    rule = fast_dllm.Rule(unmasking.rule)
    return fast_dllm.Decoding(rule, value, eos, frozenset(decoding.eos_ids))


def _answer(ids: Sequence[int], prompt: Sequence[int], workload: Workload) -> list[int]:
    """What counts as answer: everything, or up to the EOS where it ends the answer."""
    answer = list(ids[len(prompt) :])
    if workload.decoding.eos_rule is EosRule.IGNORE:
        return answer
    ends = (i for i, token in enumerate(answer) if token in workload.decoding.eos_ids)
    return answer[: next(ends, len(answer))]
