"""What the worker knows about a model, and how a checkpoint's ``config.json`` is read into it.

Decides the common terms of both families; ``llada`` and ``dream`` decide which keys they come
from, ``config`` finds the file. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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


class ConfigFields:
    """Typed access to a ``config.json``; every complaint names the file and the key."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.source = source
        self._raw = raw

    def error(self, message: str) -> ConfigurationError:
        """A complaint about this file."""
        return ConfigurationError(f"{self.source}: {message}")

    def get(self, key: str, default: Any = None) -> Any:
        """A raw value; null counts as absent."""
        value = self._raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number of at least ``minimum``."""
        value = self.get(key, default)
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"{key} must be an integer >= {minimum}, not {value!r}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.get(key, default)
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.error(f"{key} must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {value!r}")
        return value

    def require(self, key: str, supported: Any, default: Any) -> None:
        """Refuse a feature that the engine does not implement."""
        value = self.get(key, default)
        if value != supported:
            raise self.error(f"{key} {value!r} is not supported, only {supported!r}")

    def refuse(self, *keys: str) -> None:
        """Refuse features that must be absent, null or false."""
        for key in keys:
            if self.get(key, False) not in (False, {}):
                raise self.error(f"{key} {self.get(key)!r} is not supported")

    def token_id(self, key: str, vocab_size: int) -> int:
        """A token id inside the vocabulary."""
        value = self.integer(key, minimum=0)
        if value >= vocab_size:
            raise self.error(f"{key} {value} is not in the vocabulary of {vocab_size}")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
                raise self.error(f"{key} must hold ids in 0..{vocab_size - 1}, not {item!r}")
        return tuple(ids)

    def rope_theta(self, default: float) -> float:
        """RoPE base; newer files keep it in ``rope_parameters``. Scaling is refused."""
        self.refuse("rope_scaling")
        nested = self.get("rope_parameters", {})
        if not isinstance(nested, dict) or nested.get("rope_type", "default") != "default":
            raise self.error(f"rope_parameters {nested!r} is not supported, only the default type")
        if self.get("rope_theta") is None and nested.get("rope_theta") is not None:
            return ConfigFields(nested, f"{self.source}: rope_parameters").positive("rope_theta")
        return self.positive("rope_theta", default)
