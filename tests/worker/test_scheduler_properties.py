"""What the scheduler promises whatever comes and goes."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.scheduler_states import a_scheduler, a_state, arriving, key, ran

from sangam_core.wire import BlockKey
from sangam_worker.block_state import BlockState, Stage
from sangam_worker.plan import Pass, Plan
from sangam_worker.scheduler import Scheduler


@dataclass
class Watched:
    """A scheduler with its plans checked as they come."""

    scheduler: Scheduler
    tau_tokens: int
    states: dict[BlockKey, BlockState] = field(default_factory=dict)
    expected_decodes: list[str] = field(default_factory=list)
    num_admitted: int = 0
    bound: int = 0
    admitted: int = 0

    def enter(self, name: str, shape: tuple[int, str, int, str]) -> bool:
        """Let a block in; False when there is no room for it."""
        prompt_tokens, cache, num_blocks, how = shape
        given: dict[str, Any] = {"prompt_tokens": prompt_tokens, "arrival": arrival_of(name)}
        if how == "fetched":
            state = arriving(name, **given)
            has_come = self.scheduler.reserve(state)
        else:
            hands_over = how == "hands over" and cache != "none"
            given |= {"cache": cache, "num_blocks": num_blocks, "hands_over": hands_over}
            state, has_come = a_state(name, **given), True
            self.scheduler.submit(state)
        self.states[state.key] = state
        return has_come

    def keys_in(self, stage: Stage) -> list[BlockKey]:
        here = self.scheduler.keys()
        return [item for item in here if self.states[item].stage is stage]

    def plan(self) -> Plan | None:
        carried, had_waiting = self.scheduler.carried_tokens, self.scheduler.num_waiting > 0
        waiting = self.keys_in(Stage.WAITING)
        decoding = set(self.keys_in(Stage.DECODING))
        plan = self.scheduler.next_plan()
        passes = () if plan is None else plan.passes
        decodes = [item for item in passes if not item.is_whole_sequence]
        prefills = [item for item in passes if item.is_whole_sequence]
        assert decoding <= {item.key for item in decodes}, "a decode was displaced"
        self._check_order(prefills, waiting)
        self._check_bound(carried, had_waiting, decodes, prefills)
        return plan

    def _check_order(self, prefills: list[Pass], waiting: list[BlockKey]) -> None:
        line = sorted(waiting, key=lambda item: (arrival_of(item.request_id), item.request_id))
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


def arrival_of(name: str) -> float:
    return float(name.split("-")[0])


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
            if not watched.enter(name, shape):
                break
            coming.pop(0)
        for item in watched.keys_in(Stage.ARRIVING):
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
        for item in watched.keys_in(Stage.HOLDING):
            if choices.random() < 0.5:
                scheduler.remove(item)
                unfinished.discard(item.request_id)
        here = scheduler.keys()
        held = [page for item in here for page in scheduler.pages_of(item)]
        assert len(held) == len(set(held)) == total_pages - scheduler.pages.num_free
    assert (scheduler.is_empty, scheduler.pages.num_free) == (True, total_pages)


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
