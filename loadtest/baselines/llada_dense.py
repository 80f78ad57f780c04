"""A LLaDA forward pass over one sequence, in plain PyTorch with a dense K/V cache.

Decides how the baseline computes; ``fast_dllm`` decides what is fed and what is committed. It
shares no code with the serving engine, so that each can be checked against the other.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """What the forward pass needs to know of ``config.json`` (LLaDA's own key names)."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_tokens: int
    mask_id: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a checkpoint's configuration. ``KeyError`` names a key that is missing."""
        num_heads = int(config["n_heads"])
        return cls(
            num_layers=int(config["n_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("n_kv_heads") or num_heads),
            head_dim=int(config["d_model"]) // num_heads,
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(config["rope_theta"]),
            max_tokens=int(config["max_sequence_length"]),
            mask_id=int(config["mask_token_id"]),
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer, ``[out, in]`` as in the checkpoint."""

    attn_norm: Tensor
    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    attn_out: Tensor
    ff_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], index: int) -> Self:
        """Take layer ``index`` out of a state dict; ``ff_proj`` is the gate."""
        prefix = f"model.transformer.blocks.{index}."
        names = (
            "attn_norm", "q_proj", "k_proj", "v_proj", "attn_out",
            "ff_norm", "ff_proj", "up_proj", "ff_out",
        )  # fmt: skip
        return cls(*(tensors[f"{prefix}{name}.weight"] for name in names))


class KVCache:
    """Rotated keys, and values, of one sequence: ``[layers, heads, total_tokens, head_dim]``."""

    def __init__(
        self, shape: Shape, total_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (shape.num_layers, shape.num_kv_heads, total_tokens, shape.head_dim)
        self.keys = torch.empty(size, dtype=dtype, device=device)
        self.values = torch.empty(size, dtype=dtype, device=device)


class DenseLlada:
    """LLaDA over one sequence.

    Args:
        shape: sizes and constants.
        tensors: a state dict with the original key names (prefix ``model.transformer.``).
    """

    def __init__(self, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self.embedding = tensors["model.transformer.wte.weight"]
        self.final_norm = tensors["model.transformer.ln_f.weight"]
        # With tied weights the checkpoint has no head of its own.
        self.head = tensors.get("model.transformer.ff_out.weight", self.embedding)
        self.layers = [Layer.from_tensors(tensors, i) for i in range(shape.num_layers)]
        self.cos, self.sin = (table.to(self.device) for table in _rope_tables(shape))

    @property
    def device(self) -> torch.device:
        """Where the weights are, and with them all that is computed."""
        return self.embedding.device

    @classmethod
    def from_folder(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Self:
        """Read ``config.json`` and every ``*.safetensors`` of a checkpoint folder."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors.update(load_file(file))
        if not tensors:
            raise FileNotFoundError(f"{folder} holds no *.safetensors file")
        cast = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        return cls(Shape.from_config(config), cast)

    def new_cache(self, total_tokens: int) -> KVCache:
        """An empty cache for a sequence. ``ValueError`` beyond the model's longest one."""
        if total_tokens > self.shape.max_tokens:
            raise ValueError(f"{total_tokens} tokens, but the model takes {self.shape.max_tokens}")
        return KVCache(self.shape, total_tokens, self.embedding.dtype, self.device)

    def hidden(self, ids: Tensor, start: int, cache: KVCache) -> Tensor:
        """Feed the tokens ``ids`` (``[n]``, int64) of positions ``start ..`` through all layers.

        Writes their K/V to the cache, attends to all of it, and returns the rows before the final
        norm, ``[n, width]``.
        """
        stop = start + len(ids)
        rope = (self.cos[start:stop], self.sin[start:stop])
        x = F.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            keys, values = cache.keys[index], cache.values[index]
            x = x + self._attention(
                layer, self._norm(x, layer.attn_norm), rope, keys, values, start
            )
            normed = self._norm(x, layer.ff_norm)
            gated = F.silu(F.linear(normed, layer.gate)) * F.linear(normed, layer.up)
            x = x + F.linear(gated, layer.down)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: ``[n, width]`` to ``[n, vocab]``."""
        return F.linear(self._norm(hidden, self.final_norm), self.head)

    def _attention(
        self,
        layer: Layer,
        normed: Tensor,
        rope: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        start: int,
    ) -> Tensor:
        shape = self.shape
        num_rows = len(normed)
        stop = start + num_rows
        q = F.linear(normed, layer.q_proj).view(num_rows, shape.num_heads, shape.head_dim)
        k = F.linear(normed, layer.k_proj).view(num_rows, shape.num_kv_heads, shape.head_dim)
        v = F.linear(normed, layer.v_proj).view(num_rows, shape.num_kv_heads, shape.head_dim)
        keys[:, start:stop] = _rotate(k.transpose(0, 1), *rope)
        values[:, start:stop] = v.transpose(0, 1)
        mixed = F.scaled_dot_product_attention(
            _rotate(q.transpose(0, 1), *rope)[None],
            keys[None],
            values[None],
            enable_gqa=shape.num_kv_heads != shape.num_heads,
        )
        return F.linear(mixed[0].transpose(0, 1).reshape(num_rows, -1), layer.attn_out)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.shape.norm_eps).to(x.dtype)


def _rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosine and sine, ``[max_tokens, head_dim]`` float32, both halves alike (rotate-half)."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    inverse = 1.0 / (shape.rope_theta**exponents)
    angles = torch.outer(torch.arange(shape.max_tokens, dtype=torch.float32), inverse)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[heads, n, head_dim]`` in float32, rounding once."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
