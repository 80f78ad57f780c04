"""The transformer of both families: one packed forward over the rows of an iteration.

Decides which rows go through which product: in the last layer, and in the head, only those that
can still commit. Attention is the backend's, the choice of rows ``packing``'s, the choice of
tokens ``sampling``'s. Called by ``engine``. Facts: ``dllm-semantics`` section a.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sangam_worker.attention.protocol import Attention
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.linear import Linear, linear
from sangam_worker.models.rope import RotaryTable, rotate
from sangam_worker.weights import Weights


@dataclass(frozen=True, slots=True)
class _Layer:
    """Products and norms of one layer. The last one has ``q`` and ``kv`` instead of ``qkv``."""

    attention_norm: Tensor
    mlp_norm: Tensor
    attention_out: Linear
    gate: Linear
    up: Linear
    down: Linear
    qkv: Linear | None = None
    q: Linear | None = None
    kv: Linear | None = None


class Transformer:
    """Weights ready to multiply. Takes over ``weights``, whose layers it empties one by one."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._embedding = weights.outer["embedding"]
        self._final_norm = weights.outer["final_norm"]
        self._head = linear(self._embedding if config.ties_head else weights.outer.pop("head"))
        self._layers = [
            self._take_layer(group, is_last=index == config.num_layers - 1)
            for index, group in enumerate(weights.layers)
        ]
        dtype = torch.float32 if config.is_rope_in_float32 else self._embedding.dtype
        self._rope = RotaryTable(config, dtype, self._embedding.device)

    def reserve(self, num_positions: int) -> None:
        """Make sure that positions below ``num_positions`` can be rotated."""
        self._rope.reserve(num_positions)

    def forward(
        self, tokens: Tensor, positions: Tensor, head_rows: Tensor | None, attention: Attention
    ) -> Tensor:
        """Run the packed rows; K/V go to the pages that ``attention`` was planned with.

        Args:
            tokens, positions: ``[rows]``, int64; rows a multiple of ``MIN_ROWS``.
            head_rows: rows that want logits, padded to a multiple of ``MIN_ROWS``, or ``None``:
                then nothing is computed behind the last layer's K/V.

        Returns:
            ``[len(head_rows), vocab]`` in the model's dtype (``[0, vocab]`` for ``None``).
        """
        x = self._embedding.index_select(0, tokens)
        cos, sin = self._rope.rows(positions)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers[:-1]):
            mixed = self._attend(layer, index, x, cos, sin, attention)
            x = self._mlp(layer, layer.attention_out.plus(mixed, x))
        layer = self._layers[-1]
        normed = self._norm(x, layer.attention_norm)
        k, v = self._keys_values(layer, normed, cos, sin)
        if head_rows is None:
            attention.write(k, v, last)
            return x.new_empty(0, self._config.vocab_size)
        assert layer.q is not None
        x, normed = x.index_select(0, head_rows), normed.index_select(0, head_rows)
        cos, sin = cos.index_select(0, head_rows), sin.index_select(0, head_rows)
        q = rotate(self._heads(layer.q(normed)), cos, sin)
        mixed = attention.run(q, k, v, last, head_rows_only=True)
        x = self._mlp(layer, layer.attention_out.plus(mixed, x))
        return self._head(self._norm(x, self._final_norm))

    def _attend(
        self, layer: _Layer, index: int, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        assert layer.qkv is not None
        num_q, num_kv = self._config.num_heads, self._config.num_kv_heads
        qkv = self._heads(layer.qkv(self._norm(x, layer.attention_norm)))
        qk = rotate(qkv[:, : num_q + num_kv], cos, sin)
        return attention.run(qk[:, :num_q], qk[:, num_q:], qkv[:, num_q + num_kv :], index)

    def _keys_values(
        self, layer: _Layer, normed: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert layer.kv is not None
        kv = self._heads(layer.kv(normed))
        num_kv = self._config.num_kv_heads
        return rotate(kv[:, :num_kv], cos, sin), kv[:, num_kv:]

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        normed = self._norm(x, layer.mlp_norm)
        gated = layer.up.times(normed, layer.gate.silu(normed))
        return layer.down.plus(gated, x)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm in float32, rounded to the model's dtype, *then* times the weight."""
        wide = x.float()
        scale = (wide * wide).mean(-1, keepdim=True).add_(self._config.norm_eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self._config.head_dim)

    def _take_layer(self, group: dict[str, Tensor], *, is_last: bool) -> _Layer:
        qkv, bias = group.pop("qkv"), group.pop("qkv_bias", None)
        cut = self._config.num_heads * self._config.head_dim
        attention: dict[str, Linear]
        if is_last:
            attention = {
                "q": linear(qkv[:cut], None if bias is None else bias[:cut]),
                "kv": linear(qkv[cut:], None if bias is None else bias[cut:]),
            }
        else:
            attention = {"qkv": linear(qkv, bias)}
        return _Layer(
            attention_norm=group.pop("attention_norm"),
            mlp_norm=group.pop("mlp_norm"),
            attention_out=linear(group.pop("attention_out")),
            gate=linear(group.pop("gate")),
            up=linear(group.pop("up")),
            down=linear(group.pop("down")),
            **attention,
        )
