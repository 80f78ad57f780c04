"""The transformer of both families: one packed forward over the rows of an iteration.

Decides which rows go through which product: in the last layer, and in the head, only those that
can still commit. Attention is the backend's, what lies between the products ``operators``', the
choice of rows ``packing``'s, the choice of tokens ``sampling``'s. Called by ``engine``. Facts:
``dllm-semantics`` section a.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sangam_worker.attention.protocol import Attention, KeepsRows
from sangam_worker.fastest import Stopwatch
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.linear import linear
from sangam_worker.models.operators import (
    GateUp,
    KeepingRotation,
    OperatorsFactory,
    Rotation,
    TorchOperators,
)
from sangam_worker.weights import Weights

Product = Callable[[Any], Tensor]
"""A product of a layer, for rows as its operators' norms give them."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Products and norms of one layer. The last one has ``q`` and ``kv`` instead of ``qkv``."""

    attention_norm: Tensor
    mlp_norm: Tensor
    attention_out: Product
    gate_up: GateUp[Any]
    down: Product
    qkv: Product | None = None
    q: Product | None = None
    kv: Product | None = None


class Transformer:
    """Weights ready to multiply. Takes over ``weights``, whose layers it empties one by one.

    Args:
        operators: makes what lies between the products.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, operators: OperatorsFactory = TorchOperators
    ) -> None:
        self._config = config
        self._embedding = weights.outer["embedding"]
        self._operators = operators(config, self._embedding.dtype, self._embedding.device)
        self._final_norm = weights.outer["final_norm"]
        self._head = linear(self._embedding if config.ties_head else weights.outer.pop("head"))
        self._layers = [
            self._take_layer(group, is_last=index == config.num_layers - 1)
            for index, group in enumerate(weights.layers)
        ]

    def reserve(self, num_positions: int) -> None:
        """Make sure that positions below ``num_positions`` can be rotated."""
        self._operators.reserve(num_positions)

    def choose(self, num_rows: int, measure: Stopwatch) -> dict[str, str]:
        """Find out how so many rows are multiplied fastest (``Operators.choose``)."""
        return self._operators.choose(num_rows, measure)

    @property
    def no_logits(self) -> Tensor:
        """Of a pass in which nothing can commit: ``[0, vocab]``."""
        return self._embedding.new_empty(0, self._config.vocab_size)

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
        x, normed, rotation = self._below_last(tokens, positions, attention)
        layer, last = self._layers[-1], len(self._layers) - 1
        k, v = self._keys_values(layer, normed, rotation)
        if head_rows is None:
            attention.write(k, v, last)
            return self.no_logits
        assert layer.q is not None
        x, normed = x.index_select(0, head_rows), normed.index_select(0, head_rows)
        q = rotation.select(head_rows)(self._heads(layer.q(normed)))
        mixed = attention.run(q, k, v, last, head_rows_only=True)
        _, normed = self._finish(layer, mixed, x, self._final_norm, is_final=True)
        return self._head(normed)

    def forward_every_row(
        self, tokens: Tensor, positions: Tensor, attention: Attention, normed: Tensor
    ) -> None:
        """The same up to the head, of every row: nothing depends on which ones can commit.

        Rows are multiplied as ``choose`` found, since this is what graphs hold.

        Args:
            normed: ``[rows, hidden]``, written over: memory that the caller keeps. What
                ``logits_of`` takes.
        """
        with self._operators.chosen():
            x, rows, rotation = self._below_last(tokens, positions, attention)
            layer, last = self._layers[-1], len(self._layers) - 1
            k, v = self._keys_values(layer, rows, rotation)
            assert layer.q is not None
            q = rotation(self._heads(layer.q(rows)))
            mixed = attention.run(q, k, v, last)
            normed.copy_(self._finish(layer, mixed, x, self._final_norm, is_final=True)[1])

    def logits_of(self, normed: Tensor, rows: Tensor) -> Tensor:
        """The head, ``[len(rows), vocab]``.

        Args:
            normed: of ``forward_every_row``. rows: padded to a multiple of ``MIN_ROWS``.
        """
        return self._head(normed.index_select(0, rows))

    def _below_last(
        self, tokens: Tensor, positions: Tensor, attention: Attention
    ) -> tuple[Tensor, Any, Rotation]:
        """All layers but the last: the rows, the same normed for the last one, their rotation."""
        operators, layers = self._operators, self._layers
        x = self._embedding.index_select(0, tokens)
        rotation = operators.rotation(positions)
        attend = self._attending(rotation, attention)
        normed = operators.norm(x, layers[0].attention_norm)
        for index, layer in enumerate(layers[:-1]):
            assert layer.qkv is not None
            mixed = attend(self._heads(layer.qkv(normed)), index)
            x, normed = self._finish(layer, mixed, x, layers[index + 1].attention_norm)
        return x, normed, rotation

    def _attending(
        self, rotation: Rotation, attention: Attention
    ) -> Callable[[Tensor, int], Tensor]:
        """What attends, given q, k and v in one ``[rows, heads, head_dim]`` and the layer."""
        num_q, num_kv = self._config.num_heads, self._config.num_kv_heads
        places = attention.places() if isinstance(attention, KeepsRows) else None

        def attend(qkv: Tensor, index: int) -> Tensor:
            qk = rotation(qkv[:, : num_q + num_kv])
            return attention.run(qk[:, :num_q], qk[:, num_q:], qkv[:, num_q + num_kv :], index)

        if places is None or not isinstance(rotation, KeepingRotation):
            return attend
        assert isinstance(attention, KeepsRows)
        keeper, keeping, layers, slots = attention, rotation, places.layers, places.slots

        def keep_and_attend(qkv: Tensor, index: int) -> Tensor:
            if not keeping.keep(qkv, layers[index], slots):
                return attend(qkv, index)
            return keeper.attend(qkv[:, :num_q], index)

        return keep_and_attend

    def _keys_values(self, layer: _Layer, normed: Any, rotation: Rotation) -> tuple[Tensor, Tensor]:
        assert layer.kv is not None
        kv = self._heads(layer.kv(normed))
        num_kv = self._config.num_kv_heads
        return rotation(kv[:, :num_kv]), kv[:, num_kv:]

    def _finish(
        self,
        layer: _Layer,
        mixed: Tensor,
        x: Tensor,
        next_norm: Tensor,
        *,
        is_final: bool = False,
    ) -> tuple[Tensor, Any]:
        """A layer behind its attention; its rows, and those normed for what comes next."""
        operators = self._operators
        x, normed = operators.add_norm(layer.attention_out, mixed, x, layer.mlp_norm)
        gated = layer.gate_up(normed)
        return operators.add_norm(layer.down, gated, x, next_norm, is_final=is_final)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self._config.head_dim)

    def _take_layer(self, group: dict[str, Any], *, is_last: bool) -> _Layer:
        qkv, bias = group.pop("qkv"), group.pop("qkv_bias", None)
        cut = self._config.num_heads * self._config.head_dim
        product = self._operators.product
        attention: dict[str, Product]
        if is_last:
            attention = {
                "q": product(qkv[:cut], None if bias is None else bias[:cut]),
                "kv": product(qkv[cut:], None if bias is None else bias[cut:]),
            }
        else:
            attention = {"qkv": product(qkv, bias)}
        return _Layer(
            attention_norm=group.pop("attention_norm"),
            mlp_norm=group.pop("mlp_norm"),
            attention_out=product(group.pop("attention_out")),
            gate_up=self._operators.gate_up(group.pop("gate"), group.pop("up")),
            down=product(group.pop("down")),
            **attention,
        )
