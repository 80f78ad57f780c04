"""Finds a model and reads its configuration, without torch.

``resolve_model`` turns what a user writes (``small``, a folder, a hub id) into a folder;
``read_model_config`` reads that folder's ``config.json``; ``model_config`` does both, and knows
the ``random:`` shapes. ``weights`` reads the tensors.
"""

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from sangam_core.errors import ConfigurationError
from sangam_core.model_config import ConfigFields, model_tokens
from sangam_worker.models import dream, llada
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.random_models import RANDOM_PREFIX, random_config

__all__ = ["SMALL_MODEL", "ModelConfig", "model_config", "read_model_config", "resolve_model"]

SMALL_MODEL = "small"
"""Alias of the model that is shipped with the package."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["config.json", "*.safetensors", "model.safetensors.index.json"]


def model_config(model: str) -> ModelConfig:
    """The configuration of a model as a user writes it, ``random:<name>`` included.

    Raises:
        ConfigurationError: there is none, or it cannot be used.
    """
    if model.startswith(RANDOM_PREFIX):
        return random_config(model)
    return read_model_config(resolve_model(model), name=model)


def resolve_model(model: str) -> Path:
    """The local folder of a model, downloaded from the hub where it is an id.

    Raises:
        ConfigurationError: there is no such folder, and no such id can be fetched.
    """
    if model == SMALL_MODEL:
        return Path(str(files("sangam_core") / "small_model"))
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigurationError(f"model {model}: is a file; give the folder that holds it")
    if not _HUB_ID.fullmatch(model):
        raise ConfigurationError(f"model {model}: no such folder, and not a hub id (owner/name)")
    return _fetch(model)


@cache
def _fetch(model: str) -> Path:
    """Once a process, though a start asks for the configuration and then for the weights."""
    from huggingface_hub import snapshot_download  # slow to import, and only needed here

    try:
        return Path(snapshot_download(model, allow_patterns=_FILES))
    except (OSError, ValueError, RuntimeError) as error:
        # Its errors derive from OSError (HTTP, offline, no such repository) or ValueError.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigurationError(
            f"model {model}: no such folder, and not to be had from the hub: {reason}"
        ) from error


def read_model_config(path: Path | str, name: str | None = None) -> ModelConfig:
    """Read the ``config.json`` of a model folder.

    Args:
        path: the folder. name: what to call the model; the folder's name by default.

    Raises:
        ConfigurationError: the file is absent or unreadable, of another architecture, without a
            mask id, or asks for something that the engine does not implement.
    """
    folder = Path(path)
    file = folder / "config.json"
    try:
        fields = ConfigFields.parse(file.read_bytes(), str(file))
    except FileNotFoundError:
        raise ConfigurationError(f"{file}: there is no such file") from None
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error}") from None
    tokens = model_tokens(fields)
    read_config = {"llada": llada.read_config, "dream": dream.read_config}[tokens.family]
    return read_config(fields, tokens, folder.resolve().name if name is None else name)
