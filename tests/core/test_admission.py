"""Algorithm 1 alone and over whole runs, its bound checked iteration by iteration."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sangam_core.admission import (
    ADMISSION_POLICIES,
    DEFICIT,
    Admission,
    Candidate,
    admit,
    iteration_budget,
)

TOKENS = st.integers(0, 600)
COSTS = st.integers(1, 600)
CANDIDATES = st.lists(st.builds(Candidate, cost_tokens=COSTS, has_pages=st.booleans()), max_size=8)


def queue(*costs_tokens: int, has_pages: bool = True) -> list[Candidate]:
    return [Candidate(cost, has_pages) for cost in costs_tokens]


# -- one iteration ---------------------------------------------------------------------------


def test_prefills_are_admitted_from_the_head_while_they_fit() -> None:
    assert admit(0, 100, 20, queue(30, 40, 20)) == Admission(2, 10)


def test_a_small_prefill_never_overtakes_a_large_head() -> None:
    assert admit(0, 100, 20, queue(90, 5)) == Admission(0, 80)


def test_what_is_left_is_carried_until_the_head_fits() -> None:
    first = admit(0, 100, 40, queue(150))
    second = admit(first.carried_tokens, 100, 40, queue(150))
    third = admit(second.carried_tokens, 100, 40, queue(150))
    assert (first, second) == (Admission(0, 60), Admission(0, 120))
    assert third == Admission(1, 0)


def test_decodes_beyond_tau_eat_the_carried_budget_and_no_more() -> None:
    assert admit(50, 100, 130, queue(30)) == Admission(0, 20)
    assert admit(50, 100, 170, queue(30)) == Admission(0, 0)


def test_an_empty_queue_carries_nothing() -> None:
    assert admit(500, 100, 10, []) == Admission(0, 0)


def test_a_queue_that_was_emptied_carries_nothing() -> None:
    assert admit(500, 100, 10, queue(30)) == Admission(1, 0)


def test_with_nothing_else_to_run_the_head_is_admitted_at_any_size() -> None:
    assert admit(0, 100, 0, queue(5000, 5000)) == Admission(1, 0)


def test_the_idle_rule_needs_pages_and_no_decodes() -> None:
    assert admit(0, 100, 1, queue(5000)) == Admission(0, 99)
    assert admit(0, 100, 0, queue(5000, has_pages=False)) == Admission(0, 100)


def test_a_head_that_only_lacks_pages_earns_no_new_credit() -> None:
    assert admit(0, 100, 10, queue(80, has_pages=False)) == Admission(0, 0)
    assert admit(60, 100, 10, queue(80, has_pages=False)) == Admission(0, 60)


def test_a_head_that_lacks_pages_behind_admitted_ones_keeps_what_they_left() -> None:
    candidates = [Candidate(80, has_pages=True), Candidate(5, has_pages=False)]
    assert admit(0, 100, 10, candidates) == Admission(1, 0)
    assert admit(30, 100, 10, candidates) == Admission(1, 30)


def test_a_very_large_tau_admits_every_prefill_that_has_pages() -> None:
    """As Orca, vLLM and dLLM-Serve do."""
    candidates = [*queue(4000, 9000, 123), Candidate(1, has_pages=False)]
    assert admit(0, 2**31, 4096, candidates).num_admitted == 3


@given(TOKENS, TOKENS, TOKENS, CANDIDATES)
def test_only_heads_with_pages_are_admitted(
    carried: int, tau: int, decodes: int, candidates: list[Candidate]
) -> None:
    admission = admit(carried, tau, decodes, candidates)
    assert 0 <= admission.num_admitted <= len(candidates)
    assert all(candidate.has_pages for candidate in candidates[: admission.num_admitted])
    assert admission.carried_tokens >= 0


@given(TOKENS, TOKENS, TOKENS, CANDIDATES)
def test_the_admitted_cost_fits_the_budget(
    carried: int, tau: int, decodes: int, candidates: list[Candidate]
) -> None:
    admission = admit(carried, tau, decodes, candidates)
    spent = sum(candidate.cost_tokens for candidate in candidates[: admission.num_admitted])
    budget = max(0, carried + tau - decodes)
    if spent > budget:
        assert (admission, decodes) == (Admission(1, 0), 0), "only the idle rule goes beyond"
    else:
        assert spent + admission.carried_tokens <= budget


@given(TOKENS, TOKENS, TOKENS, CANDIDATES)
def test_a_head_that_fits_and_has_pages_never_waits(
    carried: int, tau: int, decodes: int, candidates: list[Candidate]
) -> None:
    admission = admit(carried, tau, decodes, candidates)
    spent = sum(candidate.cost_tokens for candidate in candidates[: admission.num_admitted])
    budget = max(0, carried + tau - decodes)
    if spent > budget or admission.num_admitted == len(candidates):
        return
    head = candidates[admission.num_admitted]
    assert not head.has_pages or spent + head.cost_tokens > budget


# -- whole runs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Iteration:
    """What comes in before an iteration, and what its decodes and pages are."""

    arrivals_tokens: list[int]
    decode_tokens: int
    free_pages: int


@dataclass
class Run:
    """Algorithm 1 over a queue that fills and empties; records every iteration.

    Ends of busy periods (nothing left waiting) cut the record into periods.
    """

    tau_tokens: int
    carried_tokens: int = 0
    waiting: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    periods: list[list[tuple[int, int, int]]] = field(default_factory=lambda: [[]])
    """Per iteration of each busy period: (admitted within budget, D, S before)."""

    def step(self, iteration: Iteration) -> Admission:
        self.waiting += iteration.arrivals_tokens
        pages = iteration.free_pages
        candidates = [Candidate(cost, pages > index) for index, cost in enumerate(self.waiting)]
        before = self.carried_tokens
        admission = admit(before, self.tau_tokens, iteration.decode_tokens, candidates)
        heads = self.waiting[: admission.num_admitted]
        del self.waiting[: admission.num_admitted]
        self.admitted += heads
        self.carried_tokens = admission.carried_tokens
        is_idle_rule = sum(heads) > iteration_budget(
            before, self.tau_tokens, iteration.decode_tokens
        )
        within = 0 if is_idle_rule else sum(heads)
        self.periods[-1].append((within, iteration.decode_tokens, before))
        if not self.waiting:
            self.periods.append([])
        return admission


ITERATIONS = st.lists(
    st.builds(
        Iteration,
        arrivals_tokens=st.lists(COSTS, max_size=3),
        decode_tokens=st.integers(0, 300),
        free_pages=st.integers(0, 4),
    ),
    min_size=1,
    max_size=40,
)


@given(st.integers(1, 400), ITERATIONS)
def test_the_admitted_tokens_of_any_busy_period_are_bounded(
    tau: int, iterations: list[Iteration]
) -> None:
    run = Run(tau)
    for iteration in iterations:
        run.step(iteration)
    for period in run.periods:
        assert not period or period[0][2] == 0, "a busy period starts without credit"
        for width in range(1, len(period) + 1):
            so_far = period[:width]
            admitted = sum(within for within, _, _ in so_far)
            decodes = sum(d for _, d, _ in so_far)
            cut_off = sum(max(0, d - tau - before) for _, d, before in so_far)
            assert admitted <= width * tau - decodes + cut_off


@given(st.integers(1, 400), ITERATIONS)
def test_prefills_run_in_the_order_of_their_arrival(tau: int, iterations: list[Iteration]) -> None:
    run = Run(tau)
    for iteration in iterations:
        run.step(iteration)
    arrived = [cost for iteration in iterations for cost in iteration.arrivals_tokens]
    assert run.admitted + run.waiting == arrived


@given(st.integers(1, 400), st.lists(COSTS, min_size=1, max_size=6), st.data())
def test_every_prefill_is_admitted_while_decodes_leave_some_budget(
    tau: int, costs: list[int], data: st.DataObject
) -> None:
    spare = data.draw(st.integers(1, tau))
    run = Run(tau)
    run.step(Iteration(costs, decode_tokens=tau - spare, free_pages=1))
    for _ in range(sum(costs) // spare + len(costs)):
        run.step(Iteration([], decode_tokens=tau - spare, free_pages=1))
    assert not run.waiting


@given(st.integers(1, 400), st.integers(1, 50), st.lists(COSTS, min_size=1, max_size=5))
def test_credit_does_not_pile_up_while_pages_are_short(
    tau: int, num_blocked: int, costs: list[int]
) -> None:
    run = Run(tau)
    run.step(Iteration(costs, decode_tokens=1, free_pages=0))
    for _ in range(num_blocked):
        run.step(Iteration([], decode_tokens=1, free_pages=0))
    assert run.carried_tokens < max(costs[0], tau)


@pytest.mark.parametrize("tau", [1, 7, 100])
def test_the_carried_budget_stays_below_the_cost_of_the_head(tau: int) -> None:
    run = Run(tau)
    run.step(Iteration([1000], decode_tokens=0, free_pages=0))
    for _ in range(5000):
        run.step(Iteration([], decode_tokens=0, free_pages=0))
        assert run.carried_tokens < 1000 + tau


def test_the_adaptive_budget_grows_with_what_waits_up_to_four_times_tau() -> None:
    budget = ADMISSION_POLICIES["adaptive"]
    assert budget(1024, 0, 0) == 1024
    assert budget(1024, 0, 8 * 1024) == 2048
    assert budget(1024, 0, 10**6) == 4096


@given(st.integers(1, 10**5), st.integers(0, 10**5), st.integers(0, 10**7))
def test_algorithm_1_has_the_same_budget_whatever_waits(tau: int, decodes: int, waits: int) -> None:
    assert ADMISSION_POLICIES[DEFICIT](tau, decodes, waits) == tau
