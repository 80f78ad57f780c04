"""Schedulers, blocks in every state, and an engine's stand-in that commits what it is told."""

from collections.abc import Iterable, Mapping
from typing import Any

from tests.worker.requests import a_case, a_decoding, a_start

from sangam_core.decoding import Commit, EosRule, Resume
from sangam_core.wire import BlockKey, KVSource
from sangam_worker.block_state import BlockState, block_state_from
from sangam_worker.plan import Outcome, PassOutcome, Plan
from sangam_worker.scheduler import Progress, Scheduler

MASK, EOS, VOCABULARY = 280, 281, 288
SOURCE = KVSource(worker_id="w", epoch="e", url="http://w.invalid")


def a_scheduler(*, total_pages: int = 100, tau_tokens: int = 100, **options: Any) -> Scheduler:
    return Scheduler(mask_id=MASK, total_pages=total_pages, tau_tokens=tau_tokens, **options)


def a_state(
    name: str = "a",
    *,
    arrival: float = 0.0,
    prompt_tokens: int = 8,
    num_blocks: int = 1,
    block_length: int = 8,
    cache: str = "dual",
    block: int = 0,
    ids: Iterable[int] | None = None,
    eos_rule: EosRule = EosRule.IGNORE,
    resume: Resume | None = None,
    **changes: Any,
) -> BlockState:
    case = a_case(
        name,
        prompt_ids=[5] * prompt_tokens,
        num_blocks=num_blocks,
        block_length=block_length,
        decoding=a_decoding(cache=cache, eos_ids=(EOS,), eos_rule=eos_rule),
    )
    start = a_start(
        case,
        block=block,
        ids=None if ids is None else tuple(ids),
        arrival_seconds=arrival,
        resume=resume,
        **changes,
    )
    return block_state_from(start, MASK, VOCABULARY)


def arriving(name: str = "a", *, step: int = 1, num_left: int = 7, **changes: Any) -> BlockState:
    """A block whose KV is fetched: ``8 - num_left`` of its 8 positions are committed."""
    prompt_tokens = changes.get("prompt_tokens", 8)
    ids = [5] * prompt_tokens + [6] * (8 - num_left) + [MASK] * num_left
    resume = Resume(step=step, initial_masks=8)
    return a_state(name, ids=ids, source=SOURCE, resume=resume, **changes)


def key(name: str, block: int = 0) -> BlockKey:
    return BlockKey(request_id=name, block=block)


def ran(
    scheduler: Scheduler, plan: Plan | None, commits: Mapping[str, Mapping[int, int]] | int = 1
) -> dict[str, Progress]:
    """Apply a plan: commits by request, or the first ``n`` masks of each pass."""
    assert plan is not None
    outcomes = []
    for item in plan.passes:
        if isinstance(commits, int):
            chosen = dict.fromkeys(item.masked[:commits], 6)
        else:
            chosen = dict(commits.get(item.key.request_id, {}))
        made = tuple(Commit(position=p, token=t, confidence=0.5) for p, t in chosen.items())
        outcomes.append(PassOutcome(item.key, made))
    progress = scheduler.apply(Outcome(plan.iteration, tuple(outcomes)))
    return {item.key.request_id: item for item in progress}


def names(plan: Plan | None) -> list[str]:
    return [] if plan is None else [item.key.request_id for item in plan.passes]


def a_resume(step: int = 2) -> Resume:
    return Resume(
        step=step,
        initial_masks=8,
        commits=(Commit(position=9, token=7, confidence=0.9), Commit(position=12, token=8)),
        carry=1.0,
    )
