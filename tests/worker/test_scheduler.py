"""A block's life in the scheduler: passes, cancelling, restarts, the end, starts that are refused.

The engine is a stand-in that commits what it is told; the system as a whole (routers, fleets,
faults) is watched in ``tests/core/test_closed_system``.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.worker.scheduler_states import (
    EOS,
    MASK,
    SOURCE,
    VOCABULARY,
    a_resume,
    a_scheduler,
    a_state,
    arriving,
    key,
    names,
    ran,
)

from sangam_core.answer import Completion
from sangam_core.decoding import Commit, EosRule, Resume
from sangam_core.errors import InvalidRequest
from sangam_worker.block_state import BlockState, Stage
from sangam_worker.scheduler import Progress, Scheduler


def test_a_block_is_prefilled_then_decoded_and_gone_when_no_mask_is_left() -> None:
    scheduler = a_scheduler(total_pages=3)
    scheduler.submit(a_state())
    first = scheduler.next_plan()
    assert first is not None
    (item,) = first.passes
    assert (item.is_whole_sequence, item.step, list(item.positions)) == (True, 0, list(range(16)))
    assert (item.masked, item.pages, item.sees) == (tuple(range(8, 16)), (0,), 16)
    assert (first.num_prefill_tokens, first.num_decode_tokens) == (16, 0)
    progress = ran(scheduler, first, {"a": dict.fromkeys(range(8, 14), 6)})["a"]
    assert (progress.is_first_here, progress.stage) == (True, Stage.DECODING)

    second = scheduler.next_plan()
    assert second is not None
    (item,) = second.passes
    assert (item.is_whole_sequence, item.step, list(item.positions)) == (False, 1, [*range(8, 16)])
    assert (item.masked, list(item.tokens)) == ((14, 15), [6] * 6 + [MASK] * 2)
    progress = ran(scheduler, second, 2)["a"]
    assert (progress.is_first_here, progress.stage) == (False, None)
    assert progress.completion is Completion.BLOCK
    assert (scheduler.pages.num_free, scheduler.is_empty, scheduler.next_plan()) == (3, True, None)


def test_a_decode_costs_the_block_with_dual_and_the_tail_with_prefix() -> None:
    for cache, expected in (("dual", 8), ("prefix", 16)):
        scheduler = a_scheduler()
        ids = [5] * 8 + [6] * 8 + [MASK] * 16
        scheduler.submit(a_state(cache=cache, num_blocks=3, block=1, ids=ids))
        ran(scheduler, scheduler.next_plan())
        plan = scheduler.next_plan()
        assert plan is not None
        assert plan.num_decode_tokens == expected
        assert plan.passes[0].positions[0] == 16
        assert plan.passes[0].sees == 32


def test_without_a_cache_every_pass_is_admitted_like_a_prefill_and_holds_no_pages() -> None:
    scheduler = a_scheduler(total_pages=1)
    scheduler.submit(a_state(cache="none"))
    for step in range(8):
        plan = scheduler.next_plan()
        assert plan is not None
        assert (plan.passes[0].step, plan.passes[0].pages) == (step, ())
        assert (plan.num_prefill_tokens, scheduler.pages.num_free) == (16, 1)
        progress = ran(scheduler, plan)["a"]
        assert progress.stage is (Stage.WAITING if step < 7 else None)


def test_uncached_passes_leave_the_decodes_beside_them_alone() -> None:
    scheduler = a_scheduler(tau_tokens=20)
    scheduler.submit(a_state("cached"))
    ran(scheduler, scheduler.next_plan())
    scheduler.submit(a_state("naive", cache="none"))
    seen = []
    for _ in range(6):
        plan = scheduler.next_plan()
        seen.append(names(plan))
        ran(scheduler, plan)
    # 12 tokens of budget an iteration, none carried when nothing waits: every other iteration.
    assert all(passes[0] == "cached" for passes in seen)
    assert ["naive" in passes for passes in seen] == [False, True] * 3


# -- cancelling ------------------------------------------------------------------------------


def with_a_block(stage: str) -> tuple[Scheduler, BlockState]:
    """A scheduler whose only block is at a stage, nothing under way."""
    scheduler = a_scheduler(total_pages=9)
    if stage in ("arriving", "parked"):
        state = arriving()
        assert scheduler.reserve(state)
        if stage == "parked":
            scheduler.arrived(state.key)
    else:
        state = a_state(hands_over=stage == "holding")
        scheduler.submit(state)
        if stage != "waiting":
            ran(scheduler, scheduler.next_plan())
    return scheduler, state


@pytest.mark.parametrize("stage", ["waiting", "decoding", "holding", "arriving", "parked"])
def test_a_cancelled_block_gives_everything_back_at_once(stage: str) -> None:
    scheduler, state = with_a_block(stage)
    assert state.stage == stage
    assert scheduler.remove(key("a"))
    assert (scheduler.is_empty, scheduler.pages.num_free) == (True, 9)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
    assert scheduler.next_plan() is None
    assert not scheduler.remove(key("a"))


@pytest.mark.parametrize("stage", ["waiting", "decoding", "parked"])
def test_a_block_cancelled_in_flight_keeps_its_pages_until_the_pass_has_run(stage: str) -> None:
    scheduler, _ = with_a_block(stage)
    plan = scheduler.next_plan()
    assert scheduler.remove(key("a"))
    assert scheduler.remove(key("a"))
    assert scheduler.pages.num_free == 8
    assert ran(scheduler, plan) == {}
    assert (scheduler.is_empty, scheduler.pages.num_free) == (True, 9)
    assert scheduler.next_plan() is None


# -- restarts --------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_a_restarted_block_repeats_its_prefill_and_goes_on_at_the_recorded_step(
    cache: str,
) -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_state(cache=cache, resume=a_resume()))
    plan = scheduler.next_plan()
    assert plan is not None
    (item,) = plan.passes
    assert (item.is_whole_sequence, item.masked, item.step) == (True, (), 0)
    assert list(item.tokens) == [5] * 8 + [MASK] * 8
    progress = ran(scheduler, plan)["a"]
    assert (progress.counts, progress.commits, progress.is_first_here) == (False, (), True)
    plan = scheduler.next_plan()
    assert plan is not None
    (item,) = plan.passes
    assert (item.step, item.carry, item.is_whole_sequence) == (2, 1.0, False)
    assert item.masked == (8, 10, 11, 13, 14, 15)
    assert (item.tokens[1], item.tokens[4]) == (7, 8)


def test_an_uncached_block_goes_on_without_repeating_anything() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_state(cache="none", resume=a_resume()))
    plan = scheduler.next_plan()
    assert plan is not None
    assert (plan.passes[0].step, plan.passes[0].masked) == (2, (8, 10, 11, 13, 14, 15))


def test_a_restarted_block_can_be_handed_over() -> None:
    scheduler = a_scheduler()
    state = a_state(resume=a_resume(), hands_over=True)
    scheduler.submit(state)
    progress = ran(scheduler, scheduler.next_plan())["a"]
    assert (progress.stage, progress.carry) == (Stage.HOLDING, 1.0)
    assert state.ids[9] == 7


# -- the end of an answer --------------------------------------------------------------------


def completion_after(commits: Mapping[int, int], **changes: Any) -> Progress:
    scheduler = a_scheduler()
    scheduler.submit(a_state(num_blocks=2, **changes))
    return ran(scheduler, scheduler.next_plan(), {"a": commits})["a"]


def test_an_answer_ends_mid_block_at_an_eos_with_no_mask_before_it() -> None:
    done = completion_after({8: 6, 9: EOS, 12: 6}, eos_rule=EosRule.END)
    assert (done.completion, done.stage) == (Completion.ANSWER, None)


def test_an_eos_behind_a_mask_ends_nothing_yet() -> None:
    done = completion_after({8: 6, 10: EOS}, eos_rule=EosRule.END)
    assert (done.completion, done.stage) == (Completion.NOTHING, Stage.DECODING)


def test_an_ignored_eos_ends_nothing() -> None:
    done = completion_after({8: 6, 9: EOS}, eos_rule=EosRule.IGNORE)
    assert done.completion is Completion.NOTHING


# -- what a block start may say --------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"ids": [5] * 15}, "ids"),
        ({"ids": [5] * 15 + [VOCABULARY]}, "ids"),
        ({"ids": [5] * 15 + [-1]}, "ids"),
        ({"ids": [5] * 16}, "ids"),
        ({"block": 1}, "key"),
        ({"cache": "half"}, "cache"),
        ({"cache": "none", "hands_over": True}, "cache"),
        ({"source": SOURCE}, "resume"),
        ({"source": SOURCE, "hands_over": True, "resume": a_resume()}, "hands_over"),
        ({"resume": Resume(step=1, initial_masks=9)}, "resume"),
        ({"resume": Resume(step=1, initial_masks=8, carry=9.0)}, "resume"),
        ({"resume": Resume(step=1, initial_masks=8, carry=float("nan"))}, "resume"),
        ({"resume": Resume(step=1, initial_masks=8, carry=-1.0)}, "resume"),
        (
            {"resume": Resume(step=1, initial_masks=8, commits=(Commit(position=7, token=1),))},
            "resume",
        ),
        (
            {
                "resume": Resume(
                    step=1, initial_masks=8, commits=(Commit(position=8, token=VOCABULARY),)
                )
            },
            "resume",
        ),
    ],
)
def test_a_block_start_that_cannot_be_run_is_refused_by_field(
    change: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        a_state(**change)
    assert refused.value.param == param


def test_a_plan_is_complete_and_does_not_change_with_the_block() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_state())
    plan = scheduler.next_plan()
    assert plan is not None
    before = list(plan.passes[0].tokens)
    ran(scheduler, plan, 4)
    assert list(plan.passes[0].tokens) == before
