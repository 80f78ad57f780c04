"""Checkpoints as published: what loads, and the one clear error for each that does not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.worker.checkpoints import (
    ABSENT,
    DREAM,
    LLADA,
    an_engine,
    dream_config,
    llada_config,
    random_state,
    write_checkpoint,
    write_shards,
)
from tests.worker.requests import a_pass, a_plan

from sangam_core.errors import ConfigurationError
from sangam_worker.engine_loading import load_engine
from sangam_worker.models.config import read_model_config, resolve_model
from sangam_worker.models.random_models import random_config
from sangam_worker.weights import Weights, random_weights, read_weights

CPU = torch.device("cpu")
IDS = [(31 * n + 7) % 280 for n in range(20)]


def logits(model: Path | str, dtype: str = "float32") -> torch.Tensor:
    return an_engine(model, dtype=dtype).forward(a_plan(a_pass(IDS, masked=range(20))))[:20]


# -- configurations --------------------------------------------------------------------------


def config_file(at: Path, config: dict[str, Any]) -> Path:
    (at / "config.json").write_text(json.dumps(config))
    return at


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
    read = read_model_config(config_file(tmp_path, config))
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
        read_model_config(config_file(tmp_path, config))
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


# -- tensors ---------------------------------------------------------------------------------

CONFIGS = {"llada": llada_config(), "dream": dream_config()}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_shards_in_any_order_give_the_same_model(
    tmp_path: Path, family: str, num_shards: int
) -> None:
    config, state = CONFIGS[family], random_state(CONFIGS[family])
    single = write_checkpoint(tmp_path / "single", config, state)
    shards = write_shards(tmp_path / "shards", config, state, lambda n: (7 * n) % num_shards)
    assert torch.equal(logits(single), logits(shards))


def test_a_checkpoint_stored_in_another_dtype_is_cast(tmp_path: Path) -> None:
    config, state = CONFIGS["llada"], random_state(CONFIGS["llada"])
    rounded = {name: tensor.bfloat16() for name, tensor in state.items()}
    stored = write_checkpoint(tmp_path / "stored", config, rounded)
    widened = {name: tensor.float() for name, tensor in rounded.items()}
    assert torch.equal(logits(stored), logits(write_checkpoint(tmp_path / "w", config, widened)))
    assert logits(stored, "bfloat16").dtype == torch.bfloat16


def test_old_exports_rotary_buffers_are_no_weights(tmp_path: Path) -> None:
    state = random_state(CONFIGS["dream"])
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    assert len(logits(write_checkpoint(tmp_path, CONFIGS["dream"], state))) == 20


FIRST_NORM = "model.transformer.blocks.0.attn_norm.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda state: state.pop(FIRST_NORM), f"tensor {FIRST_NORM} is missing"),
        (
            lambda state: [state.pop(name) for name in list(state) if "blocks.2" in name],
            "model.transformer.blocks.2.q_proj.weight is missing (and 8 more)",
        ),
        (
            lambda state: state.update({FIRST_NORM: torch.ones(65)}),
            f"tensor {FIRST_NORM} has shape (65,), but the configuration asks for (64,)",
        ),
        (
            lambda state: state.update({FIRST_NORM: torch.ones(64, dtype=torch.int8)}),
            f"tensor {FIRST_NORM} has dtype torch.int8",
        ),
        (
            lambda state: state.update({"model.transformer.blocks.3.x": torch.ones(1)}),
            "tensor model.transformer.blocks.3.x is not part of this llada configuration",
        ),
    ],
)
def test_a_tensor_that_is_missing_mis_shaped_or_left_over_is_named(
    tmp_path: Path, change: Callable[[Any], None], complaint: str
) -> None:
    state = random_state(CONFIGS["llada"])
    change(state)
    folder = write_checkpoint(tmp_path, CONFIGS["llada"], state)
    with pytest.raises(ConfigurationError) as refused:
        load_engine(str(folder), total_pages=1)
    assert complaint in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"not a tensor"])
def test_an_unreadable_weights_file_is_named(tmp_path: Path, content: bytes) -> None:
    config_file(tmp_path, CONFIGS["llada"])
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors: cannot be read"):
        load_engine(str(tmp_path), total_pages=1)


def test_a_truncated_weights_file_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["llada"])
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigurationError, match=r"model\.safetensors: cannot be read"):
        load_engine(str(folder), total_pages=1)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    config_file(tmp_path, CONFIGS["llada"])
    with pytest.raises(ConfigurationError, match="holds neither"):
        load_engine(str(tmp_path), total_pages=1)


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
)
def test_an_unreadable_index_is_named(tmp_path: Path, index: str) -> None:
    config_file(tmp_path, CONFIGS["llada"])
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigurationError, match=r"index\.json: cannot be read"):
        load_engine(str(tmp_path), total_pages=1)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = write_shards(
        tmp_path, CONFIGS["llada"], random_state(CONFIGS["llada"]), lambda n: n % 2
    )
    (folder / "model-00001.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"model-00001\.safetensors: named by"):
        load_engine(str(folder), total_pages=1)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    state = random_state(CONFIGS["llada"])
    folder = write_shards(tmp_path, CONFIGS["llada"], state, lambda n: n % 2)
    save_file(state, folder / "model-00001.safetensors")
    with pytest.raises(ConfigurationError, match="is in another file as well"):
        load_engine(str(folder), total_pages=1)


def test_shards_outside_the_folder_are_refused(tmp_path: Path) -> None:
    config_file(tmp_path, CONFIGS["llada"])
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match=r"index\.json: cannot be read"):
        load_engine(str(tmp_path), total_pages=1)


# -- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dtype": "float16"}, "dtype 'float16' is unknown"),
        ({"attention": "magic"}, "attention 'magic' is unknown"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
        ({"device": "cuda"}, "device 'cuda' cannot be used"),
        ({"total_pages": 0}, "total_pages must be at least 1"),
    ],
)
def test_an_option_that_cannot_be_had_is_named(options: dict[str, Any], complaint: str) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(ConfigurationError, match=complaint):
        load_engine(str(LLADA), **({"total_pages": 4} | options))


def test_sequences_may_be_limited_below_the_model_s_own_limit_but_not_above() -> None:
    engine = load_engine(str(LLADA), total_pages=4, max_sequence_tokens=100)
    assert engine.model_config.max_sequence_tokens == 100
    with pytest.raises(ConfigurationError, match="SANGAM_MAX_SEQUENCE_TOKENS: 5000 is more"):
        load_engine(str(LLADA), total_pages=4, max_sequence_tokens=5000)


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
