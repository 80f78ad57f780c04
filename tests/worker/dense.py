"""A dense transformer in float64, written from the published formulas: no cache, no packing.

Independent of the engine: what both agree on is taken for the model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def dense_logits(
    config: Mapping[str, Any], state: Mapping[str, Tensor], ids: Sequence[int]
) -> Tensor:
    """Raw logits ``[len(ids), vocab]`` of a whole sequence."""
    return _Dense(config, state).logits(list(ids))


class _Dense:
    def __init__(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        self.weights = {name: tensor.double() for name, tensor in state.items()}
        self.is_dream = config["model_type"] == "Dream"
        if self.is_dream:
            self.num_layers = config["num_hidden_layers"]
            self.num_heads = config["num_attention_heads"]
            self.num_kv_heads = config["num_key_value_heads"]
            width = config["hidden_size"]
        else:
            self.num_layers = config["n_layers"]
            self.num_heads, self.num_kv_heads = config["n_heads"], config["n_kv_heads"]
            width = config["d_model"]
        self.head_dim = config.get("head_dim") or width // self.num_heads
        self.theta, self.eps = config["rope_theta"], config["rms_norm_eps"]

    def logits(self, ids: list[int]) -> Tensor:
        x = self.weights[self.name("embedding")][ids]
        for layer in range(self.num_layers):
            x = x + self.attention(self.norm(x, self.name("attn_norm", layer)), layer)
            normed = self.norm(x, self.name("ff_norm", layer))
            gate = normed @ self.weights[self.name("gate", layer)].T
            up = normed @ self.weights[self.name("up", layer)].T
            x = x + (gate / (1 + (-gate).exp()) * up) @ self.weights[self.name("down", layer)].T
        head = self.weights.get(self.name("head"), self.weights[self.name("embedding")])
        return self.norm(x, self.name("final_norm")) @ head.T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[name]

    def attention(self, x: Tensor, layer: int) -> Tensor:
        rows = len(x)
        q, k, v = (self.project(x, part, layer) for part in "qkv")
        q, k = self.rotated(q), self.rotated(k)
        group = self.num_heads // self.num_kv_heads
        out = torch.zeros(rows, self.num_heads, self.head_dim, dtype=torch.float64)
        for head in range(self.num_heads):
            scores = q[:, head] @ k[:, head // group].T / self.head_dim**0.5
            out[:, head] = torch.softmax(scores, -1) @ v[:, head // group]
        return out.reshape(rows, -1) @ self.weights[self.name("out", layer)].T

    def project(self, x: Tensor, part: str, layer: int) -> Tensor:
        name = self.name(part, layer)
        y = x @ self.weights[name + ".weight"].T
        y = y + self.weights.get(name + ".bias", torch.zeros((), dtype=torch.float64))
        return y.reshape(len(x), -1, self.head_dim)

    def rotated(self, x: Tensor) -> Tensor:
        half = self.head_dim // 2
        out = torch.empty_like(x)
        for position in range(len(x)):
            for pair in range(half):
                angle = torch.tensor(position * self.theta ** (-pair / half), dtype=torch.float64)
                first, second = x[position, :, pair], x[position, :, pair + half]
                out[position, :, pair] = first * angle.cos() - second * angle.sin()
                out[position, :, pair + half] = second * angle.cos() + first * angle.sin()
        return out

    def name(self, part: str, layer: int = 0) -> str:
        if self.is_dream:
            names = {
                "embedding": "model.embed_tokens.weight",
                "final_norm": "model.norm.weight",
                "head": "lm_head.weight",
                "attn_norm": "input_layernorm.weight",
                "ff_norm": "post_attention_layernorm.weight",
                "q": "self_attn.q_proj",
                "k": "self_attn.k_proj",
                "v": "self_attn.v_proj",
                "out": "self_attn.o_proj.weight",
                "gate": "mlp.gate_proj.weight",
                "up": "mlp.up_proj.weight",
                "down": "mlp.down_proj.weight",
            }
            prefix = f"model.layers.{layer}."
        else:
            names = {
                "embedding": "model.transformer.wte.weight",
                "final_norm": "model.transformer.ln_f.weight",
                "head": "model.transformer.ff_out.weight",
                "attn_norm": "attn_norm.weight",
                "ff_norm": "ff_norm.weight",
                "q": "q_proj",
                "k": "k_proj",
                "v": "v_proj",
                "out": "attn_out.weight",
                "gate": "ff_proj.weight",
                "up": "up_proj.weight",
                "down": "ff_out.weight",
            }
            prefix = f"model.transformer.blocks.{layer}."
        is_outer = part in ("embedding", "final_norm", "head")
        return names[part] if is_outer else prefix + names[part]
