"""Where the served model's files are, and what the router has to know of its config.

Decides the folder (shipped model, local folder, or hub id) and reads family, mask id, end tokens
and length limit from the JSON files, without torch and without running the checkpoint's code.
The tokenizer is ``tokenizer``'s. Called once, at start.
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sangam_core.errors import ConfigurationError
from sangam_core.rules import Family

SHIPPED_MODEL = "small"
"""Name of the model that comes with Sangam."""

_HUB_PATTERNS = ["*.json", "*.txt", "*.jinja"]
"""What the router fetches of a hub repository: never the weights, never code."""

_FAMILIES: dict[str, Family] = {"LLaDAModelLM": "llada", "DreamModel": "dream"}
_MODEL_TYPES: dict[str, Family] = {"llada": "llada", "Dream": "dream"}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What of a model's configuration matters to the router.

    Attributes:
        vocab_size: token ids are below this.
        mask_id: the mask token, which no prompt may hold.
        eos_ids: tokens that end an answer.
        max_sequence_tokens: limit on prompt + L.
    """

    family: Family
    vocab_size: int
    mask_id: int
    eos_ids: tuple[int, ...]
    max_sequence_tokens: int


def model_folder(model: str) -> Path:
    """The folder of a model: ``small``, a local path, or a Hugging Face hub id.

    Raises:
        ConfigurationError: there is no such folder, and the hub has no such repository.
    """
    if model == SHIPPED_MODEL:
        folder = Path(str(files("sangam_core") / "small_model"))
    else:
        folder = Path(model).expanduser()
        if not folder.is_dir():
            folder = _from_hub(model)
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"SANGAM_MODEL={model}: {folder} holds no config.json")
    return folder


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download

    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigurationError(
            f"SANGAM_MODEL={model}: neither {SHIPPED_MODEL!r}, nor a folder, nor a hub id "
            "like 'GSAI-ML/LLaDA-8B-Instruct'"
        )
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS))
    except Exception as error:
        raise ConfigurationError(f"SANGAM_MODEL={model}: not on the hub: {error}") from error


def read_model_info(folder: Path) -> ModelInfo:
    """Read ``config.json`` (and ``generation_config.json`` for further end tokens).

    Raises:
        ConfigurationError: naming the file and key that is missing or of the wrong kind.
    """
    path = folder / "config.json"
    config = _read_json(path)
    architectures = config.get("architectures") or []
    family = next((_FAMILIES[name] for name in architectures if name in _FAMILIES), None)
    if not architectures:  # then model_type tells, as it does for the worker
        family = _MODEL_TYPES.get(config.get("model_type", ""))
    if family is None:
        known = ", ".join(_FAMILIES)
        raise ConfigurationError(f"{path}: architectures {architectures} is not one of {known}")
    length_key = "max_sequence_length" if family == "llada" else "max_position_embeddings"
    vocab_size = _integer(config, "vocab_size", path)
    if family == "llada" and isinstance(config.get("embedding_size"), int):
        vocab_size = max(vocab_size, int(config["embedding_size"]))
    return ModelInfo(
        family=family,
        vocab_size=vocab_size,
        mask_id=_integer(config, "mask_token_id", path),
        eos_ids=_eos_ids(folder, config),
        max_sequence_tokens=_integer(config, length_key, path),
    )


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    generation = folder / "generation_config.json"
    for source in (config, _read_json(generation) if generation.is_file() else {}):
        value = source.get("eos_token_id")
        found += [value] if isinstance(value, int) else [v for v in value or [] if v is not None]
    if not found:
        raise ConfigurationError(f"{folder / 'config.json'}: eos_token_id is missing")
    return tuple(dict.fromkeys(found))


def _integer(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigurationError(f"{path}: {key} must be an integer, not {value!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: must hold a JSON object")
    return content
