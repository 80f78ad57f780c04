"""The shapes of the models that a cost is wanted for, and the sizes that follow from them.

Decides which names are known, and what a cost needs of a model's configuration; the dimensions are
the worker's (``models``). Called by ``model``, ``capacity`` and ``fit``.
"""

from dataclasses import dataclass, replace
from functools import cache

from sangam_core.errors import ConfigurationError
from sangam_worker.models.config import SMALL_MODEL, read_model_config, resolve_model
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.random_models import RANDOM_PREFIX, random_config


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a transformer with a gated MLP and an untied head.

    Attributes:
        head_dim: of one attention head. number_bytes: of a weight, an activation and a cached
            number, as served: 2 (bfloat16), or 4 (float32, on CPUs).
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    number_bytes: int = 2

    @property
    def query_size(self) -> int:
        """Numbers in the queries of a row."""
        return self.num_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Numbers in K and V of a row, in one layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def attention_kind(self) -> str:
        """``mha`` where every head has its own K and V, else ``gqa``: kernels differ."""
        return "mha" if self.num_heads == self.num_kv_heads else "gqa"

    @property
    def layer_weights(self) -> int:
        """Weights in the products of one layer."""
        attention = self.hidden_size * (2 * self.query_size + self.key_value_size)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_weights(self) -> int:
        """Weights in the LM head."""
        return self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all products, the head and the embedding, unquantised."""
        return self.number_bytes * (self.num_layers * self.layer_weights + 2 * self.head_weights)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token across all layers."""
        return self.number_bytes * self.num_layers * self.key_value_size

    @property
    def small_kernel_bytes_per_row(self) -> int:
        """Bytes that norms, RoPE, activation and page writes move for one row in one layer.

        Two norms with the residual added (read two, write two), SiLU-mul (read gate and up, write
        one), RoPE on queries and keys (read, write), K and V onto pages (read, write).
        """
        norms = 2 * 4 * self.hidden_size
        rope = 2 * (self.query_size + self.key_value_size // 2)
        numbers = norms + 3 * self.intermediate_size + rope + 2 * self.key_value_size
        return self.number_bytes * numbers


def shape_from(config: ModelConfig, number_bytes: int) -> ModelShape:
    """The shape in a model's configuration."""
    return ModelShape(
        name=config.name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        number_bytes=number_bytes,
    )


def _published(name: str) -> ModelShape:
    """A model whose shape the worker knows without its files."""
    return replace(shape_from(random_config(RANDOM_PREFIX + name), number_bytes=2), name=name)


LLADA_8B, DREAM_7B = _published("llada-8b"), _published("dream-7b")

_SHAPES = {shape.name: shape for shape in (LLADA_8B, DREAM_7B)}


@cache
def shape_of(model: str) -> ModelShape:
    """The shape of ``llada-8b``, ``dream-7b``, ``small``, a model's folder, or a hub id.

    The shipped model is served in float32; any other is taken to be served in bfloat16.

    Raises:
        ConfigurationError: no such model, or its ``config.json`` cannot be read.
    """
    if model in _SHAPES:
        return _SHAPES[model]
    try:
        config = read_model_config(resolve_model(model), name=model)
    except ConfigurationError as error:
        known = ", ".join([*_SHAPES, SMALL_MODEL])
        raise ConfigurationError(f"{error} (known by name: {known})") from error
    return shape_from(config, number_bytes=4 if model == SMALL_MODEL else 2)
