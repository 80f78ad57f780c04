"""What the worker knows about a model.

Decides the common terms of both families; ``llada`` and ``dream`` decide which keys of a
``config.json`` they come from, ``config`` finds the file. No torch.
"""

from dataclasses import dataclass, replace

from sangam_core.errors import ConfigurationError
from sangam_core.rules import Family


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model in the engine's terms.

    Attributes:
        name: what the user called it.
        mask_id: the mask token. eos_ids: end tokens of the configuration, possibly none.
        vocab_size: rows of the embedding and of the head.
        max_sequence_tokens: prompt + mask buffer at most.
        is_rope_in_float32: rotate in float32 and round once (LLaDA); otherwise cos and sin are
            rounded to the model's dtype and multiplied in it (Dream).
        ties_head: the head is the embedding. has_qkv_bias: q, k, v projections have a bias.
    """

    family: Family
    name: str
    mask_id: int
    eos_ids: tuple[int, ...]
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    mlp_size: int
    max_sequence_tokens: int
    rope_theta: float
    norm_eps: float
    is_rope_in_float32: bool
    ties_head: bool
    has_qkv_bias: bool

    def shortened(self, max_sequence_tokens: int | None) -> "ModelConfig":
        """The same model for shorter sequences; ``None`` changes nothing.

        Raises:
            ConfigurationError: the model does not allow as many tokens.
        """
        if max_sequence_tokens is None:
            return self
        if max_sequence_tokens > self.max_sequence_tokens:
            raise ConfigurationError(
                f"SANGAM_MAX_SEQUENCE_TOKENS: {max_sequence_tokens} is more than the "
                f"{self.max_sequence_tokens} that {self.name} allows"
            )
        return replace(self, max_sequence_tokens=max_sequence_tokens)

    @property
    def num_parameters(self) -> int:
        """Weights in all tensors."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        if self.has_qkv_bias:
            attention += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.mlp_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.ties_head else 2)
        return self.num_layers * layer + embeddings + self.hidden_size
