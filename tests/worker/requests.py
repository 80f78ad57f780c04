"""Builders of cases, block starts and passes, and what one pass of an engine gives."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from sangam_core.decoding import Decoding, EosRule, Resume, Unmasking, UnmaskingRule
from sangam_core.geometry import Geometry
from sangam_core.rules import Family, decodes_in_blocks
from sangam_core.wire import BlockKey, BlockStart, WireGeometry
from sangam_worker.plan import Pass, Plan
from sangam_worker.verify.cases import Case


def a_decoding(rule: UnmaskingRule = UnmaskingRule.THRESHOLD, **changes: Any) -> Decoding:
    unmasking = {
        name: changes.pop(name)
        for name in ("threshold", "steps", "factor", "alg_temp", "eps")
        if name in changes
    }
    given = {"eos_rule": EosRule.IGNORE} | changes
    return Decoding(unmasking=Unmasking(rule=rule, **unmasking), **given)


def a_case(
    name: str,
    *,
    family: Family = "llada",
    mask_id: int = 280,
    prompt_ids: Sequence[int] = (1, 2, 3, 4, 5),
    num_blocks: int = 2,
    block_length: int = 8,
    decoding: Decoding | None = None,
) -> Case:
    """A case without expectations."""
    return Case(
        id=name,
        family=family,
        model=Path(),
        mask_id=mask_id,
        prompt_ids=tuple(prompt_ids),
        geometry=Geometry(len(prompt_ids), num_blocks, block_length),
        decoding=a_decoding() if decoding is None else decoding,
        output_ids=(),
        num_passes=0,
        forwards=(),
    )


def random_cases(family: Family, mask_id: int, number: int, seed: int = 0) -> list[Case]:
    """Cases over every rule, cache, block length and kind of sampling that the family has."""
    random = Random(seed)
    return [_random_case(f"{family}-{n}", family, mask_id, random) for n in range(number)]


def _random_case(name: str, family: Family, mask_id: int, random: Random) -> Case:
    cache = random.choice(["dual", "dual", "prefix", "none"])
    rules = list(UnmaskingRule) if family == "dream" else list(UnmaskingRule)[:3]
    rule = random.choice(rules)
    block_length = random.choice([1, 4, 8, 8, 16, 32])
    num_blocks = random.randint(1, max(1, min(4, 48 // block_length)))
    if not decodes_in_blocks(family, cache):
        block_length, num_blocks = block_length * num_blocks, 1
    temperature = random.choice([0.0, 0.0, 0.4, 1.0])
    has_draw_of_positions = rule in (
        UnmaskingRule.ENTROPY,
        UnmaskingRule.MASKGIT_PLUS,
        UnmaskingRule.TOPK_MARGIN,
    )
    decoding = a_decoding(
        rule,
        threshold=random.choice([0.3, 0.6, 0.9]),
        factor=random.choice([0.7, 1.0, 2.0]),
        steps=random.choice([None, 1, 3, 5, block_length]),
        alg_temp=random.choice([None, 0.3]) if has_draw_of_positions else None,
        cache=cache,
        temperature=temperature,
        top_p=random.choice([1.0, 0.8]),
        top_k=random.choice([0, 20]),
        seed=random.randrange(2**63),
    )
    return a_case(
        name,
        family=family,
        mask_id=mask_id,
        prompt_ids=[random.randrange(280) for _ in range(random.choice([0, 1, 5, 17, 40]))],
        num_blocks=num_blocks,
        block_length=block_length,
        decoding=decoding,
    )


def a_start(
    case: Case,
    *,
    block: int = 0,
    ids: Sequence[int] | None = None,
    arrival_seconds: float = 0.0,
    resume: Resume | None = None,
    **changes: Any,
) -> BlockStart:
    masks = [case.mask_id] * case.geometry.mask_buffer_tokens
    return BlockStart(
        key=BlockKey(request_id=case.id, block=block),
        worker_epoch="0",
        arrival_seconds=arrival_seconds,
        ids=tuple([*case.prompt_ids, *masks] if ids is None else ids),
        geometry=WireGeometry.of(case.geometry),
        decoding=case.decoding,
        resume=resume,
        **changes,
    )


def a_pass(
    ids: Sequence[int],
    *,
    name: str = "a",
    rows: range | None = None,
    sees: int | None = None,
    pages: tuple[int, ...] = (),
    masked: Sequence[int] = (),
    block: range = range(1),
    step: int = 1,
    decoding: Decoding | None = None,
    initial_masks: int | None = None,
    carry: float = 0.0,
) -> Pass:
    """A pass over ``rows`` of a sequence; step 1, so that no first position is forced."""
    rows = range(len(ids)) if rows is None else rows
    return Pass(
        key=BlockKey(request_id=name, block=0),
        positions=rows,
        tokens=[ids[position] for position in rows],
        sees=len(ids) if sees is None else sees,
        total_tokens=len(ids),
        pages=pages,
        block=block,
        block_index=0,
        step=step,
        masked=tuple(masked),
        initial_masks=len(block) if initial_masks is None else initial_masks,
        carry=carry,
        decoding=a_decoding() if decoding is None else decoding,
        is_whole_sequence=len(rows) == len(ids),
    )


def a_plan(*passes: Pass) -> Plan:
    return Plan(iteration=1, passes=passes, num_decode_tokens=0, num_prefill_tokens=0)
