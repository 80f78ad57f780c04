"""What a pass draws is drawn anew: in every pass, block, position and for every seed."""

import pytest
import torch
from tests.worker.checkpoints import LLADA
from tests.worker.requests import a_decoding, a_pass
from tests.worker.test_sampling import a_draw, frequencies

from sangam_core.decoding import UnmaskingRule
from sangam_core.rules import Family
from sangam_worker.models.config import read_model_config
from sangam_worker.sampling.rules import choose
from sangam_worker.sampling.sampler import Sampler

LENGTH = 32


def drawn_tokens(*, step: int = 1, block_index: int = 0, seed: int = 0) -> list[int]:
    """Tokens of a pass to which all are alike, and all positions commit."""
    config = read_model_config(LLADA)
    decoding = a_decoding(temperature=1.0, threshold=0.0, seed=seed)
    item = a_pass(
        [5] * LENGTH, masked=range(LENGTH), block=range(LENGTH), step=step, decoding=decoding
    )._replace(block_index=block_index)
    logits = torch.zeros(LENGTH, config.vocab_size)
    (outcome,) = Sampler(config, torch.float32).sample(logits, [item])
    assert len(outcome.commits) == LENGTH
    return [commit.token for commit in outcome.commits]


def chosen_positions(*, step: int = 1, block_index: int = 0, seed: int = 0) -> list[int]:
    """Positions that a pass commits by noise alone."""
    decoding = a_decoding(UnmaskingRule.ORIGIN, steps=8, seed=seed)
    item = a_pass(
        [5] * LENGTH, masked=range(LENGTH), block=range(LENGTH), step=step, decoding=decoding
    )._replace(block_index=block_index)
    return choose(item, "dream", [0.5] * LENGTH, 0.9)[0]


@pytest.mark.parametrize("changed", [{"step": 2}, {"block_index": 1}, {"seed": 1}])
def test_another_pass_block_or_seed_draws_other_tokens(changed: dict[str, int]) -> None:
    tokens, others = drawn_tokens(), drawn_tokens(**changed)
    assert tokens == drawn_tokens()
    assert sum(one == other for one, other in zip(tokens, others, strict=True)) < LENGTH / 4
    assert len(set(tokens)) > LENGTH / 2, "and every position"


@pytest.mark.parametrize("changed", [{"block_index": 1}, {"seed": 1}])
def test_another_block_or_seed_draws_other_positions(changed: dict[str, int]) -> None:
    assert chosen_positions() == chosen_positions()
    assert chosen_positions() != chosen_positions(**changed)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_nucleus_that_is_full_to_the_limit_still_takes_the_next_token(family: Family) -> None:
    """As in the published code: what lies before a token must exceed the limit to shut it out."""
    seen = frequencies([0.5, 0.5, 0.0, 0.0], a_draw(family, temperature=1.0, top_p=0.5), 4000)
    assert seen == pytest.approx([0.5, 0.5, 0.0, 0.0], abs=0.04)
