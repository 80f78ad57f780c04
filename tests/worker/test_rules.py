"""Unmasking rules: the golden tables, ties, and that no rule stalls."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.checkpoints import GOLDEN
from tests.worker.requests import a_decoding, a_pass

from sangam_core.decoding import UnmaskingRule
from sangam_core.rules import DREAM_RULES, LLADA_RULES, RANKED_RULES, Family
from sangam_worker.plan import Pass
from sangam_worker.sampling.rules import (
    choose,
    choose_by_factor,
    choose_by_threshold,
    committable,
    most_confident,
)
from sangam_worker.sampling.schedules import even_count, timed_count

UNITS: dict[str, list[dict[str, Any]]] = json.loads((GOLDEN / "units.json").read_text())
KINDS = {
    "fixed": most_confident,
    "threshold": choose_by_threshold,
    "factor": choose_by_factor,
}


def a_block_pass(
    length: int,
    *,
    rule: UnmaskingRule = UnmaskingRule.THRESHOLD,
    step: int = 0,
    masked: Sequence[int] | None = None,
    pages: tuple[int, ...] = (0, 1, 2, 3),
    initial_masks: int | None = None,
    carry: float = 0.0,
    **decoding: Any,
) -> Pass:
    """A pass over a block that is the whole sequence."""
    return a_pass(
        [9] * length,
        block=range(length),
        masked=range(length) if masked is None else masked,
        pages=pages,
        step=step,
        carry=carry,
        initial_masks=initial_masks,
        decoding=a_decoding(rule, **decoding),
    )


# -- golden tables ---------------------------------------------------------------------------


@pytest.mark.parametrize("table", UNITS["selection"], ids=lambda table: table["name"])
def test_selection_matches_the_golden_table(table: dict[str, Any]) -> None:
    eligible = [i for i, masked in enumerate(table["masked"]) if masked]
    confidences = [table["confidence"][i] for i in eligible]
    chosen = KINDS[table["kind"]](confidences, table["value"])
    assert [eligible[i] for i in chosen] == table["selected"]


@pytest.mark.parametrize("table", UNITS["transfer_counts"], ids=str)
def test_fixed_counts_match_the_golden_table(table: dict[str, Any]) -> None:
    counts = [even_count(table["masked"], table["steps"], n) for n in range(table["steps"])]
    assert counts == table["counts"]


def timed_counts(masked: int, steps: int, eps: float, first: int = 0) -> list[int]:
    counts = []
    for step in range(first, steps):
        counts.append(timed_count(masked, steps, step, eps))
        masked -= counts[-1]
    return counts


@pytest.mark.parametrize("table", UNITS["dream_full_schedule"], ids=str)
def test_dreams_schedule_matches_the_golden_table(table: dict[str, Any]) -> None:
    counts = timed_counts(table["masked"], table["steps"], table["eps"])
    assert counts == table["counts"]


@pytest.mark.parametrize("table", UNITS["dream_block_schedule"], ids=str)
def test_dreams_schedule_in_a_block_matches_the_golden_table(table: dict[str, Any]) -> None:
    length, steps = table["block_length"], table["steps_per_block"]
    counts = [1, *timed_counts(length - 1, steps, table["eps"], first=1)]
    assert counts == table["counts"]


# -- ties and quirks -------------------------------------------------------------------------


def test_ties_go_to_the_lower_position() -> None:
    assert most_confident([0.5, 0.9, 0.9, 0.9, 0.5], 2) == [1, 2]
    assert choose_by_threshold([0.5, 0.5, 0.5], 0.9) == [0]
    assert choose_by_factor([0.2, 0.4, 0.4, 0.4], 0.5) == [1]


def test_a_threshold_is_inclusive() -> None:
    assert choose_by_threshold([0.9, 0.89, 0.95], 0.9) == [0, 2]


def test_the_factor_rule_stops_at_the_first_failure() -> None:
    # Limits for ranks 1, 2, 3 with factor 1: any, 2/3, 3/4; the last rank's quirk needs a third.
    assert choose_by_factor([0.9, 0.6, 0.59, 0.58], 1.0) == [0]


def test_the_factor_rule_commits_the_last_rank_with_the_one_before() -> None:
    assert choose_by_factor([0.9, 0.1], 1.0) == [0, 1]
    assert choose_by_factor([0.9, 0.8, 0.1], 1.0) == [0, 1, 2]


# -- Dream -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", sorted(DREAM_RULES))
def test_dreams_first_cached_pass_commits_the_blocks_first_position_only(
    rule: UnmaskingRule,
) -> None:
    item = a_block_pass(8, rule=rule, step=0)
    assert committable(item, "dream") == (0,)
    assert choose(item, "dream", [0.01], 0.9) == ([0], 0.0)


def test_without_a_cache_every_masked_position_can_commit_in_dreams_first_pass() -> None:
    item = a_block_pass(8, rule=UnmaskingRule.THRESHOLD, step=0, pages=())
    assert committable(item, "dream") == tuple(range(8))
    assert choose(item, "dream", [0.95] * 8, 0.9)[0] == list(range(8))


def test_dreams_budgeted_threshold_carries_what_it_rejects() -> None:
    rule = UnmaskingRule.CONFIDENCE_THRESHOLD
    first = a_block_pass(8, rule=rule, steps=4, pages=())
    assert choose(first, "dream", [0.95, 0.2, 0.3, 0.95, 0.95, 0.1, 0.1, 0.1], 0.9) == ([0, 3], 0.0)
    assert choose(first, "dream", [0.5, 0.2, 0.3, 0.4, 0.1, 0.1, 0.1, 0.1], 0.9) == ([0], 1.0)
    second = a_block_pass(8, rule=rule, steps=4, pages=(), step=1, carry=1.0)
    assert choose(second, "dream", [0.95] * 7, 0.9) == ([0, 1, 2], 0.0)


def test_dreams_budgeted_threshold_takes_more_passes_than_steps_while_it_rejects() -> None:
    rule = UnmaskingRule.CONFIDENCE_THRESHOLD
    last = a_block_pass(8, rule=rule, steps=2, pages=(), step=1, carry=3.0)
    assert choose(last, "dream", [0.5] * 7, 0.9) == ([0], 6.0)
    after = a_block_pass(8, rule=rule, steps=2, pages=(), step=2, carry=6.0)
    assert choose(after, "dream", [0.95, 0.95, 0.5, 0.5, 0.5, 0.5], 0.9) == ([0, 1], 4.0)


def test_alg_temp_draws_positions_by_their_score() -> None:
    """Seen over many seeds: softmax(score / alg_temp), without replacement."""
    confidences, seen = [math.log(6), math.log(3), math.log(1)], Counter[int]()
    num_draws = 4000
    for seed in range(num_draws):
        item = a_block_pass(
            3, rule=UnmaskingRule.ENTROPY, step=2, steps=4, pages=(), alg_temp=1.0, seed=seed
        )
        assert timed_count(3, 4, 2, 1e-3) == 1
        seen.update(choose(item, "dream", confidences, 0.9)[0])
    for index, share in enumerate((0.6, 0.3, 0.1)):
        assert abs(seen[index] / num_draws - share) < 0.03


def test_origin_commits_each_mask_with_the_schedules_probability() -> None:
    counts = []
    for seed in range(400):
        item = a_block_pass(32, rule=UnmaskingRule.ORIGIN, steps=4, step=1, pages=(), seed=seed)
        counts.append(len(choose(item, "dream", [0.5] * 32, 0.9)[0]))
    assert abs(sum(counts) / (400 * 32) - 1 / 3) < 0.02  # 1 - s/t of the second of four passes
    assert len(set(counts)) > 5


def test_origin_spreads_a_block_s_commits_evenly_over_its_passes() -> None:
    """Each pass draws anew: noise of the pass before would leave the later ones too few."""
    num_seeds, steps, length = 200, 4, 32
    seen = Counter[int]()
    for seed in range(num_seeds):
        masked = tuple(range(length))
        for step in range(steps):
            item = a_block_pass(
                length,
                rule=UnmaskingRule.ORIGIN,
                steps=steps,
                step=step,
                masked=masked,
                pages=(),
                seed=seed,
                initial_masks=length,
            )
            chosen, _ = choose(item, "dream", [0.5] * len(masked), 0.9)
            seen[step] += len(chosen)
            masked = tuple(p for i, p in enumerate(masked) if i not in chosen)
    for step in range(steps):
        assert abs(seen[step] / (num_seeds * length) - 1 / steps) < 0.02


# -- nothing stalls --------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 7, 8, 14, 15, 40])
def test_a_fixed_pass_commits_something_wherever_a_restart_says_that_it_stands(step: int) -> None:
    """Of 8 masks over 16 passes the schedule gives the passes from the ninth on nothing."""
    item = a_block_pass(
        8, rule=UnmaskingRule.FIXED, steps=16, step=step, masked=(2, 7), initial_masks=8
    )
    assert choose(item, "llada", [0.1, 0.2], 0.9)[0] in ([1], [0, 1])


COMBINATIONS = [("llada", rule) for rule in sorted(LLADA_RULES)] + [
    ("dream", rule) for rule in sorted(DREAM_RULES)
]


@pytest.mark.parametrize(("family", "rule"), COMBINATIONS)
@given(data=st.data())
def test_every_block_completes_whatever_the_schedule_says(
    family: str, rule: UnmaskingRule, data: st.DataObject
) -> None:
    """From any step and any number of masks, within the schedule plus one pass a mask."""
    length = data.draw(st.integers(1, 40), "length")
    steps = data.draw(st.none() | st.integers(1, 50), "steps")
    pages = data.draw(st.sampled_from([(), (0, 1, 2)]), "pages")
    first = data.draw(st.integers(0, 60), "first step")
    masked = sorted(data.draw(st.sets(st.integers(0, length - 1), min_size=1), "masked"))
    initial_masks = data.draw(st.integers(len(masked), length), "initial masks")
    seed = data.draw(st.integers(0, 99), "seed")
    alg_temp = 0.5 if rule in RANKED_RULES and seed % 2 else None
    carry = float(data.draw(st.integers(0, length), "carry"))
    step = first
    while masked:
        item = a_block_pass(
            length,
            rule=rule,
            step=step,
            masked=masked,
            pages=pages,
            initial_masks=initial_masks,
            carry=carry,
            steps=steps,
            alg_temp=alg_temp,
            seed=seed,
        )
        able = committable(item, cast("Family", family))
        confidences = [((7 * position + step) % 10) / 10 for position in able]
        chosen, carry = choose(item, cast("Family", family), confidences, 0.9)
        assert chosen == sorted(set(chosen))
        assert 0 <= carry <= length
        masked = [position for position in masked if position not in {able[i] for i in chosen}]
        step += 1
        assert step - first <= (steps or length) + length + 1
