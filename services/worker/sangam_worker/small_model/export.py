"""Decides the files of a model folder: LLaDA's config keys and key names, weights in bfloat16.

Called by ``train`` to write and by ``evaluate`` to read. Weights are rounded to bfloat16 once;
whoever computes in float32 casts exactly these values up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sangam_worker.small_model import tokens
from sangam_worker.small_model.model import Llada, Shape


def config_of(shape: Shape) -> dict[str, Any]:
    """The content of ``config.json``."""
    return {
        "activation_type": "silu",
        "alibi": False,
        "alibi_bias_max": 8.0,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "bos_token_id": tokens.BOS,
        "d_model": shape.width,
        "embedding_dropout": 0.0,
        "embedding_size": shape.vocab,
        "eos_token_id": tokens.EOS,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_cutoff_factor": None,
        "init_device": "meta",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": tokens.MASK,
        "max_sequence_length": shape.max_length,
        "mlp_hidden_size": shape.mlp,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": shape.heads,
        "n_kv_heads": shape.heads,
        "n_layers": shape.layers,
        "pad_token_id": tokens.EOS,
        "precision": "fp32",
        "residual_dropout": 0.0,
        "rms_norm_eps": shape.norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": shape.rope_theta,
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "vocab_size": shape.vocab,
        "weight_tying": False,
    }


def write_model(folder: Path, shape: Shape, weights: dict[str, Tensor]) -> None:
    """Write config, tokenizer and weights; the model card is written by hand."""
    text = json.dumps(config_of(shape), indent=1) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    tokens.write_tokenizer(folder, shape.max_length)
    rounded = {name: value.to(torch.bfloat16).contiguous() for name, value in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def read_model(folder: Path) -> Llada:
    """Load a model folder for decoding in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(
        vocab=config["vocab_size"],
        width=config["d_model"],
        layers=config["n_layers"],
        heads=config["n_heads"],
        mlp=config["mlp_hidden_size"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        max_length=config["max_sequence_length"],
    )
    net = Llada(shape)
    stored = load_file(folder / "model.safetensors")
    net.load_state_dict({name: value.float() for name, value in stored.items()})
    return net.eval()
