"""Candidates and confidences: argmax, noise, filters, and the one thing never proposed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.worker.checkpoints import DREAM, LLADA
from tests.worker.requests import a_decoding, a_pass
from torch import Tensor

from sangam_core.decoding import UnmaskingRule
from sangam_core.rules import Family
from sangam_worker.models.config import read_model_config
from sangam_worker.sampling.candidates import ROWS_AT_ONCE, Draw, Measure, propose
from sangam_worker.sampling.noise import gumbel, noise_key, uniform
from sangam_worker.sampling.sampler import Sampler, compared_threshold

MASK = 3


def a_draw(family: Family = "llada", **changes: Any) -> Draw:
    given: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "measure": Measure.PROBABILITY,
    }
    return Draw(family=family, **(given | changes))


def keys_for(num_rows: int, seed: int = 0) -> Tensor:
    return torch.tensor([noise_key("token", seed, 0, 0, row) for row in range(num_rows)])


def proposed(rows: Sequence[Sequence[float]] | Tensor, draw: Draw, seed: int = 0) -> Any:
    logits = torch.as_tensor(rows, dtype=torch.float32)
    tokens, confidences = propose(logits, draw, keys_for(len(logits), seed), MASK)
    return tokens.tolist(), confidences.tolist()


def logits_of(probabilities: Sequence[float]) -> Tensor:
    return torch.tensor([probabilities]).log()


def frequencies(probabilities: Sequence[float], draw: Draw, num_draws: int = 20000) -> list[float]:
    rows = logits_of(probabilities).expand(num_draws, -1)
    tokens, _ = propose(rows, draw, keys_for(num_draws), MASK)
    return (torch.bincount(tokens, minlength=len(probabilities)) / num_draws).tolist()


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7, "top_p": 0.9}])
def test_many_rows_are_proposed_as_few_are(family: Family, changes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((2 * ROWS_AT_ONCE + 16, 40), generator=generator)
    draw, keys = a_draw(family, **changes), keys_for(len(rows))
    together = torch.stack([each.double() for each in propose(rows, draw, keys, MASK)])
    for start in range(0, len(rows), 16):
        some = slice(start, start + 16)
        apart = propose(rows[some], draw, keys[some], MASK)
        assert torch.equal(together[:, some], torch.stack([each.double() for each in apart]))


# -- greedy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_best_token_wins_and_the_lowest_id_breaks_a_tie(family: Family) -> None:
    rows = [[0.0, 2.0, 2.0, 0.0], [5.0, 1.0, 5.0, 0.0]]
    assert proposed(rows, a_draw(family))[0] == [1, 0]


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_token_is_never_proposed_but_keeps_its_probability(
    family: Family, temperature: float
) -> None:
    rows = [[0.0, 1.0, 0.0, 50.0]] * 50
    tokens, confidences = proposed(rows, a_draw(family, temperature=temperature))
    assert MASK not in tokens
    assert max(confidences) < 1e-20


def test_lladas_confidence_is_a_float64_softmax() -> None:
    row = [0.0, 30.0, 0.0, -5.0]
    _, (confidence,) = proposed([row], a_draw())
    expected = torch.tensor(row, dtype=torch.float64).softmax(0)[1].item()
    assert confidence == pytest.approx(expected, abs=1e-15)
    assert confidence < 1.0  # float32 would say 1


def test_dreams_confidence_is_a_softmax_in_the_models_dtype() -> None:
    _, (confidence,) = proposed([[0.0, 30.0, 0.0, -5.0]], a_draw("dream"))
    assert confidence == 1.0


def test_dreams_margin_is_to_the_best_other_entry_the_mask_included() -> None:
    draw = a_draw("dream", measure=Measure.MARGIN)
    _, (first,) = proposed(logits_of([0.6, 0.3, 0.05, 0.05]), draw)
    _, (second,) = proposed(logits_of([0.3, 0.2, 0.1, 0.4]), draw)
    assert (first, second) == (pytest.approx(0.3), pytest.approx(-0.1))


def test_dreams_margin_does_not_depend_on_the_token_that_is_drawn() -> None:
    draw = a_draw("dream", measure=Measure.MARGIN, temperature=1.0)
    tokens, margins = proposed(logits_of([0.6, 0.3, 0.05, 0.05]).expand(40, -1), draw)
    assert len(set(tokens)) > 1
    assert margins == pytest.approx([0.3] * 40)


def test_dreams_entropy_is_negative_and_in_nats() -> None:
    draw = a_draw("dream", measure=Measure.NEGATIVE_ENTROPY)
    _, (confidence,) = proposed(logits_of([0.5, 0.25, 0.25, 1e-9]), draw)
    assert confidence == pytest.approx(-1.0397, abs=1e-4)


# -- temperature and filters -----------------------------------------------------------------

PROBABILITIES = [0.5, 0.3, 0.15, 1e-9, 0.05]


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_draws_follow_the_tempered_distribution(family: Family) -> None:
    seen = frequencies(PROBABILITIES, a_draw(family, temperature=1.0))
    assert seen == pytest.approx([0.5, 0.3, 0.15, 0.0, 0.05], abs=0.015)
    cold = frequencies(PROBABILITIES, a_draw(family, temperature=0.5))
    squares = [value**2 for value in PROBABILITIES]
    assert cold == pytest.approx([value / sum(squares) for value in squares], abs=0.015)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_top_p_keeps_the_token_that_crosses_the_limit(family: Family) -> None:
    seen = frequencies(PROBABILITIES, a_draw(family, temperature=1.0, top_p=0.7))
    assert seen == pytest.approx([0.625, 0.375, 0.0, 0.0, 0.0], abs=0.015)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_top_k_keeps_the_k_best(family: Family) -> None:
    seen = frequencies(PROBABILITIES, a_draw(family, temperature=1.0, top_k=3))
    total = 0.95
    assert seen == pytest.approx([0.5 / total, 0.3 / total, 0.15 / total, 0.0, 0.0], abs=0.015)


def test_a_nucleus_of_the_mask_alone_still_leaves_a_candidate() -> None:
    tokens, _ = proposed([[0.0, 1.0, 0.0, 50.0]], a_draw("dream", top_p=0.5, top_k=1))
    assert tokens == [1]


def test_lladas_confidence_stays_that_of_the_plain_softmax_when_drawing() -> None:
    rows = logits_of(PROBABILITIES).expand(200, -1)
    tokens, confidences = proposed(rows, a_draw(temperature=1.0, top_p=0.9))
    assert len(set(tokens)) == 3
    for token, confidence in zip(tokens, confidences, strict=True):
        assert confidence == pytest.approx(PROBABILITIES[token], abs=1e-6)


def test_filters_raise_dreams_confidence_at_temperature_0_too() -> None:
    _, (plain,) = proposed(logits_of(PROBABILITIES), a_draw("dream"))
    _, (filtered,) = proposed(logits_of(PROBABILITIES), a_draw("dream", top_p=0.7))
    assert (plain, filtered) == (pytest.approx(0.5), pytest.approx(0.625))


def test_extreme_logits_neither_overflow_nor_stall() -> None:
    rows = [[1e4, -1e4, 0.0, 0.0], [-1e30, -1e30, -1e30, 0.0]]
    for family in ("llada", "dream"):
        for temperature in (0.0, 1e-3, 100.0):
            tokens, confidences = proposed(rows, a_draw(family, temperature=temperature))
            assert MASK not in tokens
            assert all(0.0 <= value <= 1.0 for value in confidences)


# -- noise -----------------------------------------------------------------------------------


def test_noise_is_a_function_of_its_key_alone() -> None:
    keys = keys_for(6)
    whole = gumbel(keys, 50)
    assert torch.equal(gumbel(keys[2:4], 50), whole[2:4])
    assert torch.equal(gumbel(keys, 70)[:, :50], whole)


def test_every_counter_changes_the_key() -> None:
    base = (1, 2, 3, 4)
    keys = {noise_key("token", *base), noise_key("position", *base)}
    for place in range(4):
        changed = [value + (number == place) for number, value in enumerate(base)]
        keys.add(noise_key("token", *changed))
    assert len(keys) == 6
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_gumbel_noise_has_the_right_mean_and_spread() -> None:
    noise = gumbel(keys_for(200), 500)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.05)


def test_uniform_noise_stays_inside_0_and_1() -> None:
    assert 0.0 < uniform(0) < uniform(2**62) < 1.0
    assert 0.0 < uniform(-1) < 1.0
    drawn = [uniform(noise_key("position", n)) for n in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.02)


# -- sampler ---------------------------------------------------------------------------------


def test_rows_of_unlike_draws_are_sampled_as_if_alone() -> None:
    config = read_model_config(DREAM)
    sampler = Sampler(config, torch.float32)
    decodings = [
        a_decoding(),
        a_decoding(UnmaskingRule.ENTROPY, steps=3),
        a_decoding(UnmaskingRule.TOPK_MARGIN, steps=3, temperature=0.7, seed=4),
        a_decoding(UnmaskingRule.ORIGIN, steps=3, top_p=0.9, temperature=1.0),
        a_decoding(),
    ]
    passes = [
        a_pass([5] * 20, name=str(n), masked=range(n, n + 7), block=range(20), decoding=decoding)
        for n, decoding in enumerate(decodings)
    ]
    logits = torch.randn(48, config.vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    together = sampler.sample(logits, passes)
    for number, item in enumerate(passes):
        rows = logits[7 * number : 7 * number + 7]
        padded = torch.cat((rows, torch.randn(9, config.vocab_size)))
        assert sampler.sample(padded, [item]) == (together[number],)


def test_thresholds_are_compared_as_each_family_does() -> None:
    """float32(0.9) is below 0.9, and bfloat16(0.9) is 0.8984375: Dream rounds, LLaDA does not."""
    assert compared_threshold(0.9, "llada", torch.bfloat16) == 0.9
    assert compared_threshold(0.9, "dream", torch.float32) == 0.8999999761581421
    assert compared_threshold(0.9, "dream", torch.bfloat16) == 0.8984375


def test_a_pass_without_masks_commits_nothing() -> None:
    config = read_model_config(LLADA)
    item = a_pass([5] * 4, masked=[])
    (outcome,) = Sampler(config, torch.float32).sample(torch.empty(0, config.vocab_size), [item])
    assert outcome.commits == ()


def test_logits_that_are_not_numbers_cost_their_own_pass_and_no_other() -> None:
    config = read_model_config(LLADA)
    logits = torch.zeros(16, config.vocab_size)
    logits[1, 7] = torch.nan
    bad = a_pass([5] * 4, masked=[0, 1], block=range(4))
    good = a_pass([5] * 4, masked=[2, 3], block=range(4))
    outcomes = Sampler(config, torch.float32).sample(logits, [bad, good])
    assert outcomes[0].commits == ()
    assert "not numbers" in str(outcomes[0].error)
    assert outcomes[1].commits
    assert outcomes[1].error is None
