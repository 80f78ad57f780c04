"""Decides the network that is trained: a compact LLaDA whose state dict has the original keys.

Called by ``train`` (batches with a key mask) and by ``decode`` (one sequence, rows of a block
on cached keys and values). The serving engine has its own implementation; this one stays small
enough to train on two CPU cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KvCache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; ``export`` writes them under LLaDA's config keys."""

    vocab: int = 288  # rows of the embedding; the ids from 262 on are never used
    width: int = 128
    layers: int = 5
    heads: int = 2
    mlp: int = 384
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_length: int = 1024

    @property
    def head_dim(self) -> int:
        """Width of one attention head; GPU kernels take no less than 64."""
        return self.width // self.heads


class RmsNorm(nn.Module):
    """RMS norm in float32, rounded to the input's type before the weight is applied."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        normed: Tensor = self.weight * (wide * scale).to(x.dtype)
        return normed


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables [max_length, head_dim] in half-split layout."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_length).float(), shape.rope_theta**-half)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, H, S, d] in float32, rounding once."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None) -> Tensor:
    """Bidirectional attention, written out: torch's fused CPU backward is far slower here."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if key_bias is not None:
        scores = scores + key_bias
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v


class Block(nn.Module):
    """One pre-norm layer without biases; ``ff_proj`` is the gate, ``ff_out`` projects down."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.head_dim = shape.heads, shape.head_dim
        self.attn_norm = RmsNorm(shape.width, shape.norm_eps)
        self.ff_norm = RmsNorm(shape.width, shape.norm_eps)
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.attn_out = nn.Linear(shape.width, shape.width, bias=False)
        self.ff_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.ff_out = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        key_bias: Tensor | None,
        cached: tuple[Tensor, Tensor] | None,
        start: int,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the new hidden rows and the rotated K and V that were attended to."""
        batch, rows, width = x.shape
        normed = self.attn_norm(x)
        q, k, v = (
            proj(normed).view(batch, rows, self.heads, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *rope), rotate(k, *rope)
        if cached is not None:
            keys, values = cached[0].clone(), cached[1].clone()
            keys[:, :, start : start + rows] = k
            values[:, :, start : start + rows] = v
            k, v = keys, values
        mixed = attend(q, k, v, key_bias)
        x = x + self.attn_out(mixed.transpose(1, 2).reshape(batch, rows, width))
        normed = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(normed)) * self.up_proj(normed)), (k, v)


class Body(nn.Module):
    """What LLaDA keeps under the prefix ``model.transformer``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = RmsNorm(shape.width, shape.norm_eps)
        self.ff_out = nn.Linear(shape.width, shape.vocab, bias=False)


class Inner(nn.Module):
    """The level of the key names between the whole network and its body."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.transformer = Body(shape)


class Llada(nn.Module):
    """The whole network; ``state_dict()`` has LLaDA's key names."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Inner(shape)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        residual = 0.02 / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = "blocks" in name and ("attn_out" in name or ".ff_out" in name)
                nn.init.normal_(parameter, std=residual if into_residual else 0.02)
        nn.init.normal_(self.model.transformer.wte.weight, std=0.1)

    def hidden(
        self,
        ids: Tensor,
        key_bias: Tensor | None = None,
        cache: KvCache | None = None,
        start: int = 0,
    ) -> tuple[Tensor, KvCache]:
        """Final hidden rows [B, S, D] for ids at positions start.., and each layer's K and V."""
        body = self.model.transformer
        rows = ids.shape[1]
        rope = (self.cos[start : start + rows], self.sin[start : start + rows])
        x = body.wte(ids)
        kept: KvCache = []
        for index, block in enumerate(body.blocks):
            x, pair = block(x, rope, key_bias, None if cache is None else cache[index], start)
            kept.append(pair)
        return body.ln_f(x), kept

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary for each row's own position."""
        scores: Tensor = self.model.transformer.ff_out(hidden)
        return scores
