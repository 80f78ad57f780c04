"""Checkpoints as published: what loads, and the one clear error for each that does not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.worker.checkpoints import (
    LLADA,
    an_engine,
    dream_config,
    llada_config,
    random_state,
    write_checkpoint,
    write_config,
    write_shards,
)
from tests.worker.requests import a_pass, a_plan

from sangam_core.errors import ConfigurationError
from sangam_worker.engine_loading import load_engine

IDS = [(31 * n + 7) % 280 for n in range(20)]


def logits(model: Path | str, dtype: str = "float32") -> torch.Tensor:
    return an_engine(model, dtype=dtype).forward(a_plan(a_pass(IDS, masked=range(20))))[:20]


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
    write_config(tmp_path, CONFIGS["llada"])
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
    write_config(tmp_path, CONFIGS["llada"])
    with pytest.raises(ConfigurationError, match="holds neither"):
        load_engine(str(tmp_path), total_pages=1)


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
)
def test_an_unreadable_index_is_named(tmp_path: Path, index: str) -> None:
    write_config(tmp_path, CONFIGS["llada"])
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
    write_config(tmp_path, CONFIGS["llada"])
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
