"""Models without a checkpoint: published shapes by name, weights that every process makes alike."""

from typing import Any

import pytest
import torch
from tests.worker.checkpoints import DREAM, LLADA
from tests.worker.requests import a_pass, a_plan

from sangam_core.errors import ConfigurationError
from sangam_worker.engine_loading import load_engine
from sangam_worker.models.config import read_model_config
from sangam_worker.models.random_models import random_config
from sangam_worker.weights import Weights, random_weights, read_weights

CPU = torch.device("cpu")


def test_a_random_model_of_another_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="random:llada-100m"):
        load_engine("random:nothing", total_pages=4)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llada-100m", 0.1), ("dream-100m", 0.1), ("llada-8b", 8.0), ("dream-7b", 7.6)],
)
def test_random_models_have_the_size_of_their_name(name: str, billions: float) -> None:
    config = random_config(f"random:{name}")
    assert config.num_parameters / 1e9 == pytest.approx(billions, rel=0.05)


@pytest.mark.parametrize(
    ("name", "parameters"), [("llada-8b", 8_015_581_184), ("dream-7b", 7_615_616_512)]
)
def test_the_published_shapes_have_the_published_number_of_parameters(
    name: str, parameters: int
) -> None:
    config = random_config(f"random:{name}")
    weights = Weights(config, torch.bfloat16, torch.device("meta"))  # nothing is allocated
    assert _num_elements(weights) == config.num_parameters == parameters
    assert len(weights.layers) == {"llada-8b": 32, "dream-7b": 28}[name]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        (
            "llada-8b",
            {"vocab_size": 126464, "num_heads": 32, "num_kv_heads": 32, "hidden_size": 4096}
            | {"mlp_size": 12288, "mask_id": 126336, "has_qkv_bias": False},
        ),
        (
            "dream-7b",
            {"vocab_size": 152064, "num_heads": 28, "num_kv_heads": 4, "hidden_size": 3584}
            | {"mlp_size": 18944, "mask_id": 151666, "has_qkv_bias": True},
        ),
    ],
)
def test_the_published_shapes_are_the_published_ones(name: str, published: dict[str, Any]) -> None:
    config = random_config(f"random:{name}")
    assert {field: getattr(config, field) for field in published} == published
    assert (config.head_dim, config.ties_head) == (128, False)


def test_the_number_of_parameters_is_that_of_the_tensors() -> None:
    for folder in (LLADA, DREAM):
        config = read_model_config(folder)
        weights = read_weights(folder, config, torch.float32, CPU)
        assert config.num_parameters == _num_elements(weights)


def _num_elements(weights: Weights) -> int:
    groups = [weights.outer, *weights.layers]
    return sum(tensor.numel() for group in groups for tensor in group.values())


def test_random_weights_are_the_same_in_every_process_and_differ_by_seed() -> None:
    config = read_model_config(DREAM)
    first, again, other = (
        random_weights(config, torch.float32, CPU, seed).layers[1]["qkv"] for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.double().sum().item() == pytest.approx(25.1718, abs=1e-3)


def test_a_random_model_runs() -> None:
    engine = load_engine("random:dream-100m", total_pages=1, dtype="bfloat16")
    assert engine.forward(a_plan(a_pass([5] * 6, masked=[2, 3]))).isfinite().all()
