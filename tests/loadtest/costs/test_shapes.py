"""Sizes follow from a model's shape, and any model that can be served has one."""

import pytest
from tests.loadtest.costs.measured import REPOSITORY

from sangam_core.errors import ConfigurationError
from sangam_loadtest.costs.shapes import DREAM_7B, LLADA_8B, shape_of


def test_the_two_models_have_their_published_sizes() -> None:
    assert LLADA_8B.weight_bytes == pytest.approx(2 * 8.02e9, rel=0.01)
    assert DREAM_7B.weight_bytes == pytest.approx(2 * 7.62e9, rel=0.01)
    # The H200 profile: 1.07 GB for 2,048 tokens of LLaDA-8B.
    assert 2048 * LLADA_8B.kv_bytes_per_token == pytest.approx(1.07e9, rel=0.01)
    assert (LLADA_8B.attention_kind, DREAM_7B.attention_kind) == ("mha", "gqa")
    assert (LLADA_8B.name, LLADA_8B.num_layers, LLADA_8B.head_dim) == ("llada-8b", 32, 128)
    assert (DREAM_7B.name, DREAM_7B.num_layers, DREAM_7B.head_dim) == ("dream-7b", 28, 128)


def test_the_shipped_model_is_read_from_its_config_and_served_in_float32() -> None:
    small = shape_of("small")
    assert (small.num_layers, small.hidden_size, small.vocab_size) == (5, 128, 288)
    assert small.number_bytes == 4


def test_a_folder_with_a_config_has_a_shape() -> None:
    folder = REPOSITORY / "tests" / "golden" / "models" / "dream-tiny-a"
    shape = shape_of(str(folder))
    assert shape.number_bytes == 2
    assert shape.num_heads % shape.num_kv_heads == 0


def test_an_unknown_model_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigurationError, match=r"no-such-model.*llada-8b, dream-7b, small"):
        shape_of("no-such-model")
