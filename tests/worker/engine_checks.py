"""What every engine must do in any number format, wherever it runs: on a CPU here, on GPUs there.

Each check takes a way to make engines and raises ``AssertionError``. ``test_engine_checks`` shows
on a CPU that they pass for what is right and fail for what is not; ``tests/gpu`` runs them on GPUs.
Nothing here compares tokens of a free run with golden ones: only in float32 do they have to agree.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tests.worker.checkpoints import DREAM, GOLDEN, LLADA, dream_config, llada_config
from tests.worker.requests import a_pass, a_plan, random_cases
from tests.worker.restarts import blocks_of, run_block, told
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.engine import Engine
from sangam_worker.plan import Pass, Plan
from sangam_worker.verify import Case, read_cases
from sangam_worker.verify.drive import Site
from sangam_worker.verify.forcing import ForcedEngine, Tally, force_cases
from sangam_worker.verify.reference import ROW_LIMIT, Reference, row_errors
from sangam_worker.verify.rounding import NumberFormat

TOTAL_PAGES = 48
UNWRITTEN = 300.0
"""On pages before anything is written: no model has such keys and values, so that whoever reads
them shows it. Not NaN: kernels may multiply what they do not count by a probability of 0."""

MODELS: dict[str, Any] = {
    "llada-tiny": LLADA,
    "dream-tiny": DREAM,
    "llada-64": llada_config(d_model=128, n_heads=2, n_kv_heads=2, mlp_hidden_size=192),
    "dream-64": dream_config(
        hidden_size=192, num_attention_heads=3, num_key_value_heads=1, intermediate_size=128
    ),
    "dream-128": dream_config(
        head_dim=128, num_attention_heads=14, num_key_value_heads=2, intermediate_size=320
    ),
}
"""The golden models, and heads of sizes that FlashInfer has kernels for (Dream's group of 7)."""


@dataclass(frozen=True)
class EngineKind:
    """A way to make engines.

    Attributes:
        load: from a model's folder and a number of pages.
        number_format: how far they may be from float32.
    """

    load: Callable[[Path, int], Engine]
    number_format: NumberFormat

    def engine(self, model: Path, total_pages: int = TOTAL_PAGES) -> Engine:
        """One whose pages hold ``UNWRITTEN``."""
        engine = self.load(model, total_pages)
        for layer in engine.kv_pool.layers:
            layer.fill_(UNWRITTEN)
        return engine


def golden_cases(family: str) -> list[Case]:
    """For each cache and rule the shortest case; with ``dual`` the one of most blocks as well."""
    chosen: dict[str, Case] = {}
    for group in _by_cache_and_rule(family):
        shortest = min(group, key=lambda case: case.num_passes)
        chosen[shortest.id] = shortest
        if shortest.decoding.cache == "dual":
            most = max(group, key=lambda case: (case.geometry.num_blocks, -case.num_passes))
            chosen[most.id] = most
    return list(chosen.values())


def _by_cache_and_rule(family: str) -> list[list[Case]]:
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in read_cases(GOLDEN):
        if case.family == family:
            key = case.decoding.cache, case.decoding.unmasking.rule
            groups.setdefault(key, []).append(case)
    return list(groups.values())


def tally_of(kind: EngineKind, cases: list[Case], in_flight: int) -> Tally:
    """Golden cases of one model under teacher forcing."""
    model = cases[0].model
    total_pages = in_flight * max(case.geometry.num_pages for case in cases)
    reference = Reference(model, kind.number_format, total_pages)
    forced = ForcedEngine(reference, kind.engine(model, total_pages))
    assert len(list(force_cases(cases, forced, in_flight=in_flight))) == len(cases)
    return forced.tally


def check_golden_states(kind: EngineKind, family: str, in_flight: int = 6) -> Tally:
    """Every pass of golden cases, from the golden state before it."""
    cases = golden_cases(family)
    tally = tally_of(kind, cases, in_flight)
    assert not tally.disagreements, tally.disagreements[:5]
    assert tally.num_passes == sum(case.num_passes for case in cases)
    assert tally.num_tokens > 100
    return tally


# Logits


def some_plans(engine_family: str, vocab_size: int) -> list[Plan]:
    """Prefills on pages in no order, one sequence without pages, then blocks of them all.

    Lengths end within a page, at its end and on its first row.
    """
    random = Random(3)
    tables = [(7, 3, 11, 0), (12, 5, 9), (1, 30, 2, 31, 4), (6,)]
    prefills, decodes = [], []
    for number, (pages, length) in enumerate(zip(tables, (60, 48, 65, 9), strict=True)):
        ids = [random.randrange(vocab_size) for _ in range(length)]
        block = range(length - 8, length) if number % 2 else range(length // 2, length // 2 + 8)
        given: dict[str, Any] = {"name": str(number), "pages": pages, "block": block}
        prefills.append(a_pass(ids, masked=block, **given))
        decodes.append(a_pass(ids, rows=block, masked=block[1:], **given))
    alone = a_pass([random.randrange(vocab_size) for _ in range(21)], name="n", masked=[2, 20])
    return [
        a_plan(prefills[0], alone),
        a_plan(decodes[0], *prefills[1:]),
        a_plan(*decodes),
        a_plan(decodes[2]),
        a_plan(alone, decodes[3]),
    ]


def check_logits(kind: EngineKind, model: Path) -> float:
    """Rows within what the number format explains; the largest share of what is allowed."""
    reference, engine = a_pair(kind, model)
    config = engine.model_config
    largest = 0.0
    for plan in some_plans(config.family, config.vocab_size):
        rows, deviations = reference.expected(plan)
        for got in logits_of(reference, engine, plan):
            errors = row_errors(got, rows)
            assert (errors <= ROW_LIMIT * deviations).all(), (errors, deviations)
            if not kind.number_format.is_exact:
                largest = max(largest, float((errors / deviations).max()) / ROW_LIMIT)
    return largest


def check_two_agree(one: EngineKind, other: EngineKind, model: Path) -> None:
    """Two ways to compute in one number format: each a draw of its errors."""
    reference, first = a_pair(one, model)
    second = other.engine(model)
    config = first.model_config
    for plan in some_plans(config.family, config.vocab_size):
        _, deviations = reference.expected(plan)
        for got in logits_of(reference, second, plan):
            wanted = reference.candidates(first.forward(plan), plan)
            errors = row_errors(got, wanted)
            assert (errors <= 2**0.5 * ROW_LIMIT * deviations).all(), (errors, deviations)


def a_pair(kind: EngineKind, model: Path) -> tuple[Reference, Engine]:
    return Reference(model, kind.number_format, TOTAL_PAGES), kind.engine(model)


def logits_of(reference: Reference, engine: Engine, plan: Plan) -> list[Tensor]:
    """Candidates' logits: issued one by one, and from a graph where one carries the plan."""
    made = [engine.forward(plan), engine.replay(plan)]
    return [reference.candidates(each, plan) for each in made if each is not None]


def check_packed_is_as_single(kind: EngineKind, model: Path) -> None:
    """Sequences in one batch as each of them by itself.

    The same bits where nothing may differ; otherwise two draws of the number format's errors.
    """
    reference, together = a_pair(kind, model)
    single = kind.engine(model)
    config = together.model_config
    for plan in some_plans(config.family, config.vocab_size):
        _, deviations = reference.expected(plan)
        alone = torch.cat([reference_rows(reference, single, item) for item in plan.passes])
        for packed in logits_of(reference, together, plan):
            errors = row_errors(packed, alone)
            assert (errors <= 2**0.5 * ROW_LIMIT * deviations).all(), (errors, deviations)


def reference_rows(reference: Reference, engine: Engine, item: Pass) -> Tensor:
    plan = a_plan(item)
    return reference.candidates(engine.forward(plan), plan)


def check_runs_repeat(kind: EngineKind, model: Path) -> None:
    """The same plan gives the same bits: at once again, after others, and on another engine."""
    engines = [kind.engine(model) for _ in range(2)]
    config = engines[0].model_config
    plans = some_plans(config.family, config.vocab_size)
    seen = [[], [], []]  # type: list[list[Any]]
    for engine, numbers in ((engines[0], (0, 1)), (engines[1], (2,))):
        for number in numbers:
            for plan in plans:
                seen[number].append((engine.forward(plan).cpu(), engine.execute(plan)))
        rows, outcome = engine.forward(plans[-1]).cpu(), engine.execute(plans[-1])
        assert torch.equal(rows, seen[numbers[-1]][-1][0])
        assert outcome == seen[numbers[-1]][-1][1]
    for one, *others in zip(*seen, strict=True):
        for rows, outcome in others:
            assert torch.equal(rows, one[0])
            assert outcome == one[1]


# Pages


def check_other_pages_are_untouched(kind: EngineKind, model: Path) -> None:
    """A pass writes the rows that it feeds, on its own pages, and not a byte elsewhere."""
    engine = kind.engine(model)
    pool, config = engine.kv_pool, engine.model_config
    for layer in pool.layers:
        torch.manual_seed(len(layer))
        layer.copy_(torch.randn(layer.shape))
    for plan in some_plans(config.family, config.vocab_size):
        written = torch.zeros(pool.total_pages, PAGE_TOKENS, dtype=torch.bool)
        for item in plan.passes:
            for position in item.positions if item.pages else ():
                written[item.pages[position // PAGE_TOKENS], position % PAGE_TOKENS] = True
        for layer in pool.layers:  # what is written again with the same values would not show
            layer.masked_fill_(written[:, None, :, None, None].to(layer.device), UNWRITTEN)
        before = [layer.clone() for layer in pool.layers]
        engine.execute(plan)
        for layer, kept in zip(pool.layers, before, strict=True):
            keys, values = (layer != kept).any(-1).any(-1).unbind(1)
            assert torch.equal(keys.cpu(), written)
            assert torch.equal(values.cpu(), written)


# Blocks


def check_restarts_continue(kind: EngineKind, model: Path) -> None:
    """A block lost at any step goes on as it would have, to the last bit of its confidences.

    Alone on its engine: then its passes are the same work for the device (design section 5).
    """
    engine, elsewhere = kind.engine(model), kind.engine(model)
    config = engine.model_config
    num_restarts = 0
    for case in random_cases(config.family, config.mask_id, 8, seed=9):
        block = blocks_of(engine, case)[-1]
        for step in range(0, len(block.passes), max(1, len(block.passes) // 3)):
            resumed = run_block(Site(elsewhere, 512), block, block.resume_at(step))
            assert told(resumed) == told(block.passes[step:]), (case.id, step)
            num_restarts += step > 0
    assert num_restarts > 5


@contextlib.contextmanager
def fails() -> Any:
    """A check that has to fail."""
    try:
        yield
    except AssertionError:
        return
    raise AssertionError("the check passed for a broken engine")
