"""Tiny random checkpoints of any shape, as published files, and engines over them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine

GOLDEN = Path(__file__).parents[1] / "golden"
LLADA, DREAM = GOLDEN / "models" / "llada-tiny-a", GOLDEN / "models" / "dream-tiny-a"


def llada_config(**changes: Any) -> dict[str, Any]:
    config = json.loads((LLADA / "config.json").read_text())
    return without_absent(config | {"embedding_size": 288} | changes)


def dream_config(**changes: Any) -> dict[str, Any]:
    return without_absent(json.loads((DREAM / "config.json").read_text()) | changes)


ABSENT = object()
"""A value that takes a key out of a configuration."""


def without_absent(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not ABSENT}


def llada_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the original state dict."""
    width, mlp, vocab = config["d_model"], config["mlp_hidden_size"], config["embedding_size"]
    kv = width // config["n_heads"] * config["n_kv_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.transformer.wte.weight": (vocab, width),
        "model.transformer.ln_f.weight": (width,),
    }
    if not config["weight_tying"]:
        shapes["model.transformer.ff_out.weight"] = (vocab, width)
    for layer in range(config["n_layers"]):
        own: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (width,),
            "ff_norm.weight": (width,),
            "q_proj.weight": (width, width),
            "k_proj.weight": (kv, width),
            "v_proj.weight": (kv, width),
            "attn_out.weight": (width, width),
            "ff_proj.weight": (mlp, width),
            "up_proj.weight": (mlp, width),
            "ff_out.weight": (width, mlp),
        }
        if config["include_qkv_bias"]:
            own |= {"q_proj.bias": (width,), "k_proj.bias": (kv,), "v_proj.bias": (kv,)}
        shapes |= {f"model.transformer.blocks.{layer}.{name}": at for name, at in own.items()}
    return shapes


def dream_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the original state dict."""
    width, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", width // config["num_attention_heads"])
    q = head_dim * config["num_attention_heads"]
    kv = head_dim * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, width)
    for layer in range(config["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            "self_attn.q_proj.weight": (q, width),
            "self_attn.k_proj.weight": (kv, width),
            "self_attn.v_proj.weight": (kv, width),
            "self_attn.q_proj.bias": (q,),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.bias": (kv,),
            "self_attn.o_proj.weight": (width, q),
            "mlp.gate_proj.weight": (mlp, width),
            "mlp.up_proj.weight": (mlp, width),
            "mlp.down_proj.weight": (width, mlp),
        }
        shapes |= {f"model.layers.{layer}.{name}": at for name, at in own.items()}
    return shapes


def random_state(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights of moderate size: confident on some positions, unsure on others."""
    shapes = (dream_shapes if config["model_type"] == "Dream" else llada_shapes)(config)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        if name.endswith(("norm.weight", "ln_f.weight")):
            state[name] = 1.0 + 0.1 * drawn
        elif len(shape) == 1:
            state[name] = 0.3 * drawn
        else:
            state[name] = drawn * (1.5 / shape[1] ** 0.5)
    return state


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """A folder with ``config.json`` and nothing else yet."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor] | None = None
) -> Path:
    """A folder with ``config.json`` and one ``model.safetensors``."""
    write_config(folder, config)
    save_file(dict(random_state(config) if state is None else state), folder / "model.safetensors")
    return folder


def write_shards(
    folder: Path,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    shard_of: Callable[[int], int],
) -> Path:
    """The same weights over several files with an index."""
    write_config(folder, config)
    shards: dict[str, dict[str, Tensor]] = {}
    weight_map = {}
    for number, (name, tensor) in enumerate(state.items()):
        file = f"model-{shard_of(number):05d}.safetensors"
        shards.setdefault(file, {})[name] = tensor
        weight_map[name] = file
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def an_engine(model: Path | str, *, total_pages: int = 64, dtype: str = "float32") -> Engine:
    """An engine whose pages are full of NaN: what was never written cannot be read unnoticed."""
    engine = load_engine(str(model), total_pages=total_pages, dtype=dtype)
    for layer in engine.kv_pool.layers:
        layer.fill_(torch.nan)
    return engine
