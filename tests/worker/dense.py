"""A dense transformer in float64, written from the published formulas: no packing, no pages.

Independent of the engine: what both agree on is taken for the model. Its cache is a plain list of
K and V for every position, which a pass overwrites at the rows it feeds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_DREAM = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "ff_norm": "model.layers.{}.post_attention_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "out": "model.layers.{}.self_attn.o_proj.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
_LLADA = {
    "embedding": "model.transformer.wte.weight",
    "final_norm": "model.transformer.ln_f.weight",
    "head": "model.transformer.ff_out.weight",
    "attn_norm": "model.transformer.blocks.{}.attn_norm.weight",
    "ff_norm": "model.transformer.blocks.{}.ff_norm.weight",
    "q": "model.transformer.blocks.{}.q_proj",
    "k": "model.transformer.blocks.{}.k_proj",
    "v": "model.transformer.blocks.{}.v_proj",
    "out": "model.transformer.blocks.{}.attn_out.weight",
    "gate": "model.transformer.blocks.{}.ff_proj.weight",
    "up": "model.transformer.blocks.{}.up_proj.weight",
    "down": "model.transformer.blocks.{}.ff_out.weight",
}


def dense_logits(
    config: Mapping[str, Any], state: Mapping[str, Tensor], ids: Sequence[int]
) -> Tensor:
    """Raw logits ``[len(ids), vocab]`` of a whole sequence."""
    return Dense(config, state).logits(ids, range(len(ids)))


class Dense:
    """A model with the K and V that its passes have left."""

    def __init__(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        self.weights = {name: tensor.double() for name, tensor in state.items()}
        self.is_dream = config["model_type"] == "Dream"
        self.names = _DREAM if self.is_dream else _LLADA
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
        self.cache: list[tuple[Tensor, Tensor]] = []

    def logits(self, ids: Sequence[int], rows: range) -> Tensor:
        """Feed ``rows`` of a sequence; a whole sequence starts the cache afresh."""
        if len(rows) == len(ids):
            shape = (len(ids), self.num_kv_heads, self.head_dim)
            self.cache = [
                (torch.zeros(shape).double(), torch.zeros(shape).double())
                for _ in range(self.num_layers)
            ]
        x = self.weight("embedding")[list(ids)[rows.start : rows.stop]]
        for layer in range(self.num_layers):
            x = x + self.attention(self.norm(x, "attn_norm", layer), layer, rows)
            normed = self.norm(x, "ff_norm", layer)
            gate = self.product(normed, self.weight("gate", layer))
            up = self.product(normed, self.weight("up", layer))
            gated = gate / (1 + (-gate).exp()) * up
            x = x + self.product(gated, self.weight("down", layer))
        head = self.weights.get(self.names["head"], self.weight("embedding"))
        return self.norm(x, "final_norm") @ head.T

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """One of a layer's products."""
        return x @ weight.T

    def norm(self, x: Tensor, name: str, layer: int = 0) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
        return x / scale * self.weight(name, layer)

    def attention(self, x: Tensor, layer: int, rows: range) -> Tensor:
        q, k, v = (self.project(x, part, layer) for part in "qkv")
        keys, values = self.cache[layer]
        keys[rows.start : rows.stop] = self.rotated(k, rows)
        values[rows.start : rows.stop] = v
        group = self.num_heads // self.num_kv_heads
        q, keys, values = (
            self.rotated(q, rows),
            keys.repeat_interleave(group, 1),
            values.repeat_interleave(group, 1),
        )
        scores = torch.einsum("thd,shd->hts", q, keys) / self.head_dim**0.5
        mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), values)
        return self.product(mixed.reshape(len(x), -1), self.weight("out", layer))

    def project(self, x: Tensor, part: str, layer: int) -> Tensor:
        name = self.names[part].format(layer)
        y = self.product(x, self.weights[name + ".weight"])
        y = y + self.weights.get(name + ".bias", torch.zeros(()).double())
        return y.reshape(len(x), -1, self.head_dim)

    def rotated(self, x: Tensor, rows: range) -> Tensor:
        """Pair i is (i, i + head_dim / 2), turned by position * theta^(-2i / head_dim)."""
        half = self.head_dim // 2
        positions = torch.tensor(list(rows)).double()
        pairs = torch.arange(half).double()
        angles = positions[:, None, None] * self.theta ** (-pairs / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def weight(self, name: str, layer: int = 0) -> Tensor:
        return self.weights[self.names[name].format(layer)]
