"""What a model's ``config.json`` says of tokens and lengths: the same to routers and workers.

Decides which architectures are served, and the vocabulary, mask token, end tokens and longest
sequence of each. What an engine needs beside (layers, heads) the worker reads by ``ConfigFields``
too. Finding and opening the file is the caller's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sangam_core.errors import ConfigurationError
from sangam_core.rules import Family

_ARCHITECTURES: Mapping[str, Family] = {"LLaDAModelLM": "llada", "DreamModel": "dream"}
_MODEL_TYPES: Mapping[str, Family] = {"llada": "llada", "Dream": "dream"}
_LENGTH_KEYS: Mapping[Family, str] = {
    "llada": "max_sequence_length",
    "dream": "max_position_embeddings",
}


class ConfigFields:
    """Typed access to a ``config.json``; every complaint names the file and the key."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.source = source
        self._raw = raw

    @classmethod
    def parse(cls, content: bytes, source: str) -> "ConfigFields":
        """The fields of a file with this content.

        Raises:
            ConfigurationError: it is no JSON object.
        """
        try:
            raw = json.loads(content.decode())
        except ValueError as error:  # a UnicodeDecodeError is one
            raise ConfigurationError(f"{source}: cannot be read: {error}") from None
        if not isinstance(raw, dict):
            raise ConfigurationError(f"{source}: must hold a JSON object")
        return cls(raw, source)

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
        """Refuse a feature that is not implemented."""
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


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """A model as far as requests go.

    Attributes:
        vocab_size: token ids are below this; rows of the embedding.
        mask_id: the mask token, which no prompt may hold.
        eos_ids: tokens that end an answer; a configuration may name none.
        max_sequence_tokens: limit on prompt + L.
    """

    family: Family
    vocab_size: int
    mask_id: int
    eos_ids: tuple[int, ...]
    max_sequence_tokens: int


def model_tokens(fields: ConfigFields) -> ModelTokens:
    """Read what both families have, under each one's keys.

    Raises:
        ConfigurationError: another architecture; a key is missing, or of the wrong kind.
    """
    family = _family(fields)
    vocab_size = fields.integer("vocab_size")
    if family == "llada":
        vocab_size = fields.integer("embedding_size", vocab_size)
    return ModelTokens(
        family=family,
        vocab_size=vocab_size,
        mask_id=fields.token_id("mask_token_id", vocab_size),
        eos_ids=fields.token_ids("eos_token_id", vocab_size),
        max_sequence_tokens=fields.integer(_LENGTH_KEYS[family]),
    )


def _family(fields: ConfigFields) -> Family:
    """By the one architecture; where none is named, ``model_type`` tells."""
    declared = fields.get("architectures") or [fields.get("model_type", "none")]
    for names in (_ARCHITECTURES, _MODEL_TYPES):
        for name, family in names.items():
            if declared == [name]:
                return family
    known = " and ".join(f"[{name!r}]" for name in _ARCHITECTURES)
    raise fields.error(f"architectures {declared!r} is not supported, only {known}")
