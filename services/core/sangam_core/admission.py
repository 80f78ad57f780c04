"""Algorithm 1: the deficit token budget that decides which prefills join an iteration.

Pure: plain numbers in, a decision out. The worker's scheduler calls it once per iteration, the
simulator through the same scheduler. It does not choose decodes (all of them always run) and
knows nothing of pages beyond a yes or no per candidate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting prefill: its cost (prompt + L, tokens) and whether its pages are free.

    ``has_pages`` must be evaluated as if every earlier candidate had been admitted.
    """

    cost_tokens: int
    has_pages: bool


@dataclass(frozen=True, slots=True)
class Admission:
    """How many candidates from the head are admitted, and the budget S carried on (tokens)."""

    num_admitted: int
    carried_tokens: int


def iteration_budget(carried_tokens: int, tau_tokens: int, decode_tokens: int) -> int:
    """What an iteration may spend on prefills (tokens): S <- max(0, S + tau - D)."""
    return max(0, carried_tokens + tau_tokens - decode_tokens)


def admit(
    carried_tokens: int, tau_tokens: int, decode_tokens: int, candidates: Sequence[Candidate]
) -> Admission:
    """Decide one iteration (paper, Algorithm 1, deficit token budget).

    S <- max(0, S + tau - D); the head is admitted while its cost fits S, which then pays for it,
    in strict arrival order. An empty queue carries nothing. Two rules of ours (design section 3):

    * while *pages* rather than budget block the head, no new credit accrues, else it would be
      spent in one burst when pages come free;
    * idle rule: with nothing else in the microbatch the head is admitted at any size, and what
      credit there was is spent on it.

    Over any busy period of W iterations the admitted tokens are therefore bounded by
    ``W * tau - sum(D) + sum(max(0, D - tau - S_before))``, idle admissions counted apart.

    Args:
        carried_tokens: S from the last iteration.
        tau_tokens: tau, the budget of one iteration.
        decode_tokens: D, query rows of the decodes in this iteration.
        candidates: the waiting prefills in arrival order.
    """
    if not candidates:
        return Admission(0, 0)
    budget = iteration_budget(carried_tokens, tau_tokens, decode_tokens)
    num_admitted = 0
    for candidate in candidates:
        if candidate.cost_tokens > budget or not candidate.has_pages:
            break
        budget -= candidate.cost_tokens
        num_admitted += 1
    if num_admitted == len(candidates):
        return Admission(num_admitted, 0)
    head = candidates[num_admitted]
    if num_admitted == 0 and decode_tokens == 0 and head.has_pages:
        return Admission(1, 0)
    if not head.has_pages and head.cost_tokens <= budget:
        budget = min(budget, carried_tokens)
    return Admission(num_admitted, budget)


BudgetPolicy = Callable[[int, int, int], int]
"""tau, D and the waiting prefill tokens -> the tau of this iteration; Algorithm 1 does the rest."""


def fixed_budget(tau_tokens: int, decode_tokens: int, waiting_tokens: int) -> int:
    """The same tau whatever waits (paper, Algorithm 1)."""
    return tau_tokens


def budget_following_queue(tau_tokens: int, decode_tokens: int, waiting_tokens: int) -> int:
    """tau and an eighth of what waits, at most four times tau: adaptive tau.

    A long queue is worked off faster at the decodes' cost, a short one leaves them alone. What it
    gives, by simulation, is in loadtest/reproduction.
    """
    return min(4 * tau_tokens, tau_tokens + waiting_tokens // 8)


DEFICIT = "deficit"
"""Name of Algorithm 1 with a fixed tau."""

ADAPTIVE = "adaptive"
"""Name of the budget that follows the queue."""

ADMISSION_POLICIES: dict[str, BudgetPolicy] = {
    DEFICIT: fixed_budget,
    ADAPTIVE: budget_following_queue,
}
"""Admission policies by the name that settings have: which tau an iteration gets."""
