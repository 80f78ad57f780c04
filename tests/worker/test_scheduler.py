"""The scheduler by itself: order, budget, pages, cancelling, transfers, restarts, end of answer.

The engine is a stand-in that commits what it is told; the system as a whole (routers, fleets,
faults) is watched in ``tests/core/test_closed_system``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.requests import a_case, a_decoding, a_start

from sangam_core.answer import Completion
from sangam_core.decoding import Commit, EosRule, Resume
from sangam_core.errors import InvalidRequest
from sangam_core.wire import BlockKey, KVSource
from sangam_worker.block_state import BlockState, Stage, block_state_from
from sangam_worker.plan import Outcome, Pass, PassOutcome, Plan
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


# -- a block's life --------------------------------------------------------------------------


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


# -- order and budget ------------------------------------------------------------------------


def test_prefills_run_in_request_arrival_order_then_by_id() -> None:
    scheduler = a_scheduler(tau_tokens=16)
    for name, arrival in (("c", 2.0), ("b", 1.0), ("d", 2.0), ("a", 3.0)):
        scheduler.submit(a_state(name, arrival=arrival))
    order = []
    while not scheduler.is_empty:
        plan = scheduler.next_plan()
        assert plan is not None
        order += [item.key.request_id for item in plan.passes if item.is_whole_sequence]
        ran(scheduler, plan, 8)
    assert order == ["b", "c", "d", "a"]


def test_a_later_block_keeps_its_requests_place_in_the_line() -> None:
    scheduler = a_scheduler(tau_tokens=16)
    scheduler.submit(a_state("young", arrival=5.0))
    ids = [5] * 8 + [6] * 8 + [MASK] * 8
    scheduler.submit(a_state("old", arrival=1.0, num_blocks=2, block=1, ids=ids))
    assert names(scheduler.next_plan()) == ["old"]


def test_a_small_prefill_does_not_overtake_a_large_one_that_waits_for_budget() -> None:
    scheduler = a_scheduler(tau_tokens=30)
    scheduler.submit(a_state("running"))
    ran(scheduler, scheduler.next_plan())
    scheduler.submit(a_state("large", arrival=1.0, prompt_tokens=40))
    scheduler.submit(a_state("small", arrival=2.0, prompt_tokens=0))
    assert names(scheduler.next_plan()) == ["running"]


def test_a_large_prefill_is_admitted_when_its_deficit_has_built_up() -> None:
    scheduler = a_scheduler(tau_tokens=30)
    scheduler.submit(a_state("running", prompt_tokens=0))
    ran(scheduler, scheduler.next_plan())
    scheduler.submit(a_state("large", arrival=1.0, prompt_tokens=52))
    seen = []
    for _ in range(3):
        plan = scheduler.next_plan()
        seen.append(names(plan))
        ran(scheduler, plan)
    assert seen == [["running"], ["running"], ["running", "large"]]  # 22, 44, 66 >= 60


def test_a_head_without_pages_blocks_the_line_until_some_come_free() -> None:
    scheduler = a_scheduler(total_pages=4, tau_tokens=1000)
    scheduler.submit(a_state("a", prompt_tokens=40))
    ran(scheduler, scheduler.next_plan(), 7)
    scheduler.submit(a_state("b", arrival=1.0, prompt_tokens=40))
    scheduler.submit(a_state("c", arrival=2.0))
    plan = scheduler.next_plan()
    assert names(plan) == ["a"]
    ran(scheduler, plan)
    assert names(scheduler.next_plan()) == ["b", "c"]


def test_a_block_larger_than_the_whole_pool_can_never_be_held() -> None:
    scheduler = a_scheduler(total_pages=2)
    assert scheduler.can_ever_hold(a_state(prompt_tokens=24))
    assert not scheduler.can_ever_hold(a_state(prompt_tokens=25))
    assert scheduler.can_ever_hold(a_state(prompt_tokens=500, cache="none"))


# -- transfers -------------------------------------------------------------------------------


def test_a_prefilled_block_holds_its_pages_until_it_is_released() -> None:
    scheduler = a_scheduler(total_pages=2)
    scheduler.submit(a_state(hands_over=True))
    progress = ran(scheduler, scheduler.next_plan())["a"]
    assert progress.stage is Stage.HOLDING
    assert (scheduler.next_plan(), scheduler.pages_of(key("a"))) == (None, (0,))
    assert scheduler.remove(key("a"))
    assert scheduler.pages.num_free == 2


def test_a_block_that_its_prefill_completes_is_not_held() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_state(hands_over=True))
    progress = ran(scheduler, scheduler.next_plan(), 8)["a"]
    assert (progress.completion, progress.stage) == (Completion.BLOCK, None)
    assert scheduler.is_empty


def test_a_fetched_block_decodes_only_once_its_kv_is_here() -> None:
    scheduler = a_scheduler(total_pages=3)
    assert scheduler.reserve(arriving())
    assert (scheduler.stage_of(key("a")), scheduler.pages.num_free) == (Stage.ARRIVING, 2)
    assert scheduler.next_plan() is None
    scheduler.arrived(key("a"))
    plan = scheduler.next_plan()
    assert plan is not None
    assert (plan.passes[0].step, plan.passes[0].masked) == (1, tuple(range(9, 16)))


def test_a_reservation_without_room_holds_nothing() -> None:
    scheduler = a_scheduler(total_pages=1)
    assert scheduler.reserve(arriving("a"))
    assert not scheduler.reserve(arriving("b"))
    assert key("b") not in scheduler


def test_a_younger_transferred_decode_waits_beyond_its_share_while_a_prefill_waits() -> None:
    scheduler = a_scheduler(tau_tokens=16)  # share: 12 tokens, one decode of 8
    assert scheduler.reserve(arriving("running", arrival=0.0))
    scheduler.arrived(key("running"))
    ran(scheduler, scheduler.next_plan())
    scheduler.submit(a_state("prefill", arrival=1.0, prompt_tokens=52))
    for name, arrival in (("young", 2.0), ("old", 0.5)):
        assert scheduler.reserve(arriving(name, arrival=arrival))
        scheduler.arrived(key(name))
    plan = scheduler.next_plan()
    assert names(plan) == ["running", "old"]
    assert scheduler.stage_of(key("young")) is Stage.PARKED
    ran(scheduler, plan)
    scheduler.remove(key("prefill"))
    assert names(scheduler.next_plan()) == ["running", "old", "young"]


def test_parked_decodes_join_at_once_when_no_prefill_waits() -> None:
    scheduler = a_scheduler(tau_tokens=16)
    for number in range(6):
        assert scheduler.reserve(arriving(str(number)))
        scheduler.arrived(key(str(number)))
    plan = scheduler.next_plan()
    assert plan is not None
    assert plan.num_decode_tokens == 48


# -- cancelling ------------------------------------------------------------------------------


def stages() -> dict[str, Scheduler]:
    """A scheduler for each stage that block "a" can be in, nothing under way."""
    waiting, decoding, holding, coming, parked = (a_scheduler(total_pages=9) for _ in range(5))
    waiting.submit(a_state())
    for scheduler, state in ((decoding, a_state()), (holding, a_state(hands_over=True))):
        scheduler.submit(state)
        ran(scheduler, scheduler.next_plan())
    for scheduler in (coming, parked):
        assert scheduler.reserve(arriving())
    parked.arrived(key("a"))
    return {
        "waiting": waiting,
        "decoding": decoding,
        "holding": holding,
        "arriving": coming,
        "parked": parked,
    }


@pytest.mark.parametrize("stage", ["waiting", "decoding", "holding", "arriving", "parked"])
def test_a_cancelled_block_gives_everything_back_at_once(stage: str) -> None:
    scheduler = stages()[stage]
    assert scheduler.stage_of(key("a")) == stage
    assert scheduler.remove(key("a"))
    assert (scheduler.is_empty, scheduler.pages.num_free) == (True, 9)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
    assert scheduler.next_plan() is None
    assert not scheduler.remove(key("a"))


@pytest.mark.parametrize("stage", ["waiting", "decoding", "parked"])
def test_a_block_cancelled_in_flight_keeps_its_pages_until_the_pass_has_run(stage: str) -> None:
    scheduler = stages()[stage]
    plan = scheduler.next_plan()
    assert scheduler.remove(key("a"))
    assert scheduler.remove(key("a"))
    assert scheduler.pages.num_free == 8
    assert ran(scheduler, plan) == {}
    assert (scheduler.is_empty, scheduler.pages.num_free) == (True, 9)
    assert scheduler.next_plan() is None


# -- restarts --------------------------------------------------------------------------------


def a_resume(step: int = 2) -> Resume:
    return Resume(
        step=step,
        initial_masks=8,
        commits=(Commit(position=9, token=7, confidence=0.9), Commit(position=12, token=8)),
        carry=1.0,
    )


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
    scheduler.submit(a_state(resume=a_resume(), hands_over=True))
    progress = ran(scheduler, scheduler.next_plan())["a"]
    assert (progress.stage, progress.carry) == (Stage.HOLDING, 1.0)
    assert scheduler.ids_of(key("a"))[9] == 7


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


# -- properties ------------------------------------------------------------------------------


def keys_in(scheduler: Scheduler, stage: Stage) -> list[BlockKey]:
    here = scheduler.keys()
    return [item for item in here if scheduler.stage_of(item) is stage]


@dataclass
class Watched:
    """A scheduler with its plans checked as they come."""

    scheduler: Scheduler
    tau_tokens: int
    expected_decodes: list[str] = field(default_factory=list)
    num_admitted: int = 0
    bound: int = 0
    admitted: int = 0

    def plan(self) -> Plan | None:
        carried, had_waiting = self.scheduler.carried_tokens, self.scheduler.num_waiting > 0
        waiting = keys_in(self.scheduler, Stage.WAITING)
        decoding = set(keys_in(self.scheduler, Stage.DECODING))
        plan = self.scheduler.next_plan()
        passes = () if plan is None else plan.passes
        decodes = [item for item in passes if not item.is_whole_sequence]
        prefills = [item for item in passes if item.is_whole_sequence]
        assert decoding <= {item.key for item in decodes}, "a decode was displaced"
        self._check_order(prefills, waiting)
        self._check_bound(carried, had_waiting, decodes, prefills)
        return plan

    def _check_order(self, prefills: list[Pass], waiting: list[BlockKey]) -> None:
        line = sorted(waiting, key=lambda item: (arrival_of(item), item.request_id))
        assert [item.key for item in prefills] == line[: len(prefills)], "out of arrival order"

    def _check_bound(
        self, carried: int, had_waiting: bool, decodes: list[Pass], prefills: list[Pass]
    ) -> None:
        """The issue's bound over the busy period so far; idle admissions are counted apart."""
        cost = sum(len(item.positions) for item in decodes)
        admitted = sum(len(item.positions) for item in prefills)
        if not had_waiting:
            self.bound = self.admitted = 0
            return
        budget = max(0, carried + self.tau_tokens - cost)
        self.bound += self.tau_tokens - cost + max(0, cost - self.tau_tokens - carried)
        if not decodes and len(prefills) == 1 and admitted > budget:
            return  # the idle rule
        self.admitted += admitted
        assert self.admitted <= self.bound
        if self.scheduler.num_waiting == 0:
            self.bound = self.admitted = 0


def arrival_of(item: BlockKey) -> float:
    return float(item.request_id.split("-")[0])


BLOCKS = st.tuples(
    st.integers(0, 60),  # prompt tokens
    st.sampled_from(["dual", "dual", "prefix", "none"]),
    st.integers(1, 3),  # blocks in the buffer
    st.sampled_from(["here", "here", "hands over", "fetched"]),
)


@given(
    blocks=st.lists(BLOCKS, min_size=1, max_size=14),
    tau_tokens=st.integers(1, 150),
    total_pages=st.integers(7, 20),
    choices=st.randoms(use_true_random=False),
)
def test_whatever_comes_and_goes_the_promises_hold(
    blocks: list[tuple[int, str, int, str]], tau_tokens: int, total_pages: int, choices: Any
) -> None:
    """Decodes never displaced, arrival order, the bound, pages conserved, everything finishes."""
    scheduler = a_scheduler(total_pages=total_pages, tau_tokens=tau_tokens)
    watched = Watched(scheduler, tau_tokens)
    coming = [(f"{choices.randint(0, 9)}-{number}", shape) for number, shape in enumerate(blocks)]
    unfinished, iterations = {name for name, _ in coming}, 0
    while unfinished:
        iterations += 1
        assert iterations < 3000, "somebody starves"
        while coming and choices.random() < 0.5:
            name, shape = coming[0]
            if not enter(scheduler, name, shape):
                break
            coming.pop(0)
        for item in keys_in(scheduler, Stage.ARRIVING):
            if choices.random() < 0.5:
                scheduler.arrived(item)
        plan = watched.plan()
        here = scheduler.keys()
        cancelled = {
            item.request_id for item in here if choices.random() < 0.02 and scheduler.remove(item)
        }
        unfinished -= cancelled
        if plan is not None:
            progress = ran(scheduler, plan, choices.randint(1, 3))
            assert not cancelled & progress.keys()
            unfinished -= {name for name, item in progress.items() if item.stage is None}
        for item in keys_in(scheduler, Stage.HOLDING):
            if choices.random() < 0.5:
                scheduler.remove(item)
                unfinished.discard(item.request_id)
        here = scheduler.keys()
        held = [page for item in here for page in scheduler.pages_of(item)]
        assert len(held) == len(set(held)) == total_pages - scheduler.pages.num_free
    assert (scheduler.is_empty, scheduler.pages.num_free) == (True, total_pages)


def enter(scheduler: Scheduler, name: str, shape: tuple[int, str, int, str]) -> bool:
    prompt_tokens, cache, num_blocks, how = shape
    given: dict[str, Any] = {"prompt_tokens": prompt_tokens, "arrival": float(name.split("-")[0])}
    if how == "fetched":
        return scheduler.reserve(arriving(name, **given))
    hands_over = how == "hands over" and cache != "none"
    scheduler.submit(
        a_state(name, cache=cache, num_blocks=num_blocks, hands_over=hands_over, **given)
    )
    return True


@given(
    tau_tokens=st.integers(8, 64),
    prompt_tokens=st.integers(0, 100),
    share=st.sampled_from([0.25, 0.75]),
)
def test_a_prefill_gets_its_turn_though_decodes_arrive_without_end(
    tau_tokens: int, prompt_tokens: int, share: float
) -> None:
    scheduler = a_scheduler(tau_tokens=tau_tokens, total_pages=400, transferred_decode_share=share)
    scheduler.submit(a_state("0-prefill", arrival=0.0, prompt_tokens=prompt_tokens))
    for number in range(2000):
        for side in "ab":
            name = f"1-{number}{side}"
            if scheduler.reserve(arriving(name, arrival=1.0 + number)):
                scheduler.arrived(key(name))
        plan = scheduler.next_plan()
        assert plan is not None
        if any(item.is_whole_sequence for item in plan.passes):
            return
        ran(scheduler, plan, 1)
    pytest.fail("the prefill starved")


def test_a_plan_is_complete_and_does_not_change_with_the_block() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_state())
    plan = scheduler.next_plan()
    assert plan is not None
    before = list(plan.passes[0].tokens)
    ran(scheduler, plan, 4)
    assert list(plan.passes[0].tokens) == before


def test_an_adaptive_budget_counts_what_waits_and_forgets_what_has_gone() -> None:
    fixed = a_scheduler(tau_tokens=16)
    adaptive = a_scheduler(tau_tokens=16, admission="adaptive")
    for scheduler in (fixed, adaptive):
        scheduler.submit(a_state("old"))
        ran(scheduler, scheduler.next_plan())
        for number in range(20):
            scheduler.submit(a_state(f"w{number:02}", arrival=1.0 + number))
    # Of 16 each: tau is 16 and, adaptive, 20 * 16 / 8 more; the decode takes 8 of it.
    assert names(fixed.next_plan()) == ["old"]
    plan = adaptive.next_plan()
    assert names(plan) == ["old", "w00", "w01", "w02"]
    ran(adaptive, plan)
    for number in range(3, 20):
        adaptive.remove(key(f"w{number:02}"))
    for name in ("w00", "w01", "w02"):
        adaptive.remove(key(name))
    adaptive.submit(a_state("last", arrival=99.0))
    adaptive.carried_tokens = 0
    # Nothing is left of what waited: 16 + 16 / 8 less 8 for the decode are too few for it.
    assert names(adaptive.next_plan()) == ["old"]


# -- the bound on an iteration ----------------------------------------------------------------


def test_a_full_batch_holds_prefills_back_until_a_block_has_left() -> None:
    scheduler = a_scheduler(max_batch_blocks=2)
    for number in range(3):
        scheduler.submit(a_state(f"r{number}", arrival=number))
    first = scheduler.next_plan()
    assert names(first) == ["r0", "r1"]
    ran(scheduler, first, {"r0": {8: 6}, "r1": {8: 6}})
    second = scheduler.next_plan()
    assert names(second) == ["r0", "r1"]
    ran(scheduler, second, {"r0": dict.fromkeys(range(9, 16), 6), "r1": {9: 6}})
    assert names(scheduler.next_plan()) == ["r1", "r2"]


def test_waiting_for_room_in_the_batch_earns_no_credit() -> None:
    scheduler = a_scheduler(max_batch_blocks=1)
    for number in range(2):
        scheduler.submit(a_state(f"r{number}", arrival=number))
    carried = []
    for _ in range(3):
        ran(scheduler, scheduler.next_plan(), {"r0": {}})
        carried.append(scheduler.carried_tokens)
    assert carried == [0, 0, 0]


def test_transferred_decodes_join_a_full_batch_only_when_a_block_has_left() -> None:
    scheduler = a_scheduler(max_batch_blocks=1)
    for number in range(2):
        state = arriving(f"r{number}", arrival=number, num_left=2)
        assert scheduler.reserve(state)
        scheduler.arrived(state.key)
    first = scheduler.next_plan()
    assert names(first) == ["r0"]
    ran(scheduler, first, 2)
    assert names(scheduler.next_plan()) == ["r1"]
