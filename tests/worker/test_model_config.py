"""A model's configuration and its place: what is understood, one clear error for the rest."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.worker.checkpoints import ABSENT, DREAM, LLADA, dream_config, llada_config, write_config

from sangam_core.errors import ConfigurationError
from sangam_worker.models.config import read_model_config, resolve_model


def test_lladas_configuration_is_read() -> None:
    config = read_model_config(LLADA)
    assert (config.family, config.name) == ("llada", "llada-tiny-a")
    assert (config.mask_id, config.eos_ids, config.vocab_size) == (280, (281,), 288)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 4)
    assert (config.head_dim, config.mlp_size, config.max_sequence_tokens) == (16, 160, 512)
    assert (config.rope_theta, config.norm_eps) == (500000.0, 1e-5)
    assert not config.ties_head
    assert config.is_rope_in_float32


def test_dreams_configuration_is_read() -> None:
    config = read_model_config(DREAM)
    assert (config.family, config.mask_id, config.eos_ids) == ("dream", 300, (296,))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.has_qkv_bias
    assert not config.is_rope_in_float32


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (llada_config(eos_token_id=[281, 282]), {"eos_ids": (281, 282)}),
        (llada_config(eos_token_id=None), {"eos_ids": ()}),
        (llada_config(n_kv_heads=None), {"num_kv_heads": 4}),
        (llada_config(n_kv_heads=None, multi_query_attention=True), {"num_kv_heads": 1}),
        (llada_config(mlp_hidden_size=None), {"mlp_size": 256}),
        (llada_config(rope_full_precision=False), {"is_rope_in_float32": False}),
        (llada_config(architectures=ABSENT), {"family": "llada"}),
        (
            dream_config(rope_theta=ABSENT, rope_parameters={"rope_theta": 5e4}),
            {"rope_theta": 5e4},
        ),
        (dream_config(head_dim=32), {"head_dim": 32}),
    ],
)
def test_variants_of_a_configuration_are_understood(
    tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    read = read_model_config(write_config(tmp_path, config))
    assert {name: getattr(read, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (llada_config(architectures=["LlamaForCausalLM"]), "architectures ['LlamaForCausalLM']"),
        (llada_config(architectures=ABSENT, model_type="bert"), "architectures ['bert']"),
        (llada_config(mask_token_id=ABSENT), "mask_token_id is missing"),
        (dream_config(mask_token_id=None), "mask_token_id is missing"),
        (llada_config(mask_token_id=288), "mask_token_id 288 is not in the vocabulary"),
        (llada_config(mask_token_id=True), "mask_token_id must be an integer"),
        (llada_config(eos_token_id=[1, 999]), "eos_token_id must hold ids in 0..287"),
        (llada_config(d_model=ABSENT), "d_model is missing"),
        (llada_config(d_model="64"), "d_model must be an integer"),
        (llada_config(n_layers=0), "n_layers must be an integer >= 1"),
        (llada_config(d_model=65), "d_model 65 is not a multiple of n_heads 4"),
        (llada_config(n_kv_heads=3), "n_heads 4 is not a multiple of n_kv_heads 3"),
        (llada_config(alibi=True), "alibi True is not supported"),
        (llada_config(block_type="sequential"), "block_type 'sequential' is not supported"),
        (llada_config(layer_norm_type="default"), "layer_norm_type 'default' is not supported"),
        (llada_config(activation_type="swiglu"), "activation_type 'swiglu' is not supported"),
        (llada_config(include_bias=True), "include_bias True is not supported"),
        (llada_config(rope=False), "rope False is not supported"),
        (llada_config(rope_scaling={"type": "linear"}), "rope_scaling"),
        (llada_config(block_group_size=2), "block_group_size 2 is not supported"),
        (llada_config(attention_layer_norm=True), "attention_layer_norm"),
        (llada_config(scale_logits=True), "scale_logits"),
        (llada_config(rope_theta=0), "rope_theta must be a number above 0"),
        (dream_config(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (dream_config(use_sliding_window=True), "use_sliding_window"),
        (dream_config(rope_scaling={"rope_type": "yarn"}), "rope_scaling"),
        (dream_config(rope_parameters={"rope_type": "yarn"}), "rope_parameters"),
        (dream_config(hidden_size=66), "hidden_size 66 is not a multiple"),
        (dream_config(num_key_value_heads=3), "not a multiple of num_key_value_heads 3"),
        (dream_config(tie_word_embeddings="no"), "tie_word_embeddings must be true or false"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_named(
    tmp_path: Path, config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_model_config(write_config(tmp_path, config))
    assert complaint in str(refused.value)
    assert str(tmp_path / "config.json") in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_an_unreadable_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_an_absent_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json: there is no such file"):
        read_model_config(tmp_path)


def test_reading_a_configuration_needs_no_torch() -> None:
    code = "import sys, sangam_worker.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- finding a model -------------------------------------------------------------------------


def test_a_folder_is_its_own_place() -> None:
    assert resolve_model(str(LLADA)) == LLADA


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("./nowhere", "no such folder"),
        ("/not/there", "no such folder"),
        (str(LLADA / "config.json"), "is a file"),
    ],
)
def test_a_model_that_is_nowhere_is_named(model: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as refused:
        resolve_model(model)
    assert model in str(refused.value)


def test_a_hub_id_that_cannot_be_fetched_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from sangam_worker.models.config import resolve_model\n"
        "from sangam_core.errors import ConfigurationError\n"
        "try:\n    resolve_model('nobody/nothing-at-all')\n"
        "except ConfigurationError as error:\n    print(error)\n"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("model nobody/nothing-at-all: no such folder, and not to be had")
    assert done.stdout.count("\n") == 1
