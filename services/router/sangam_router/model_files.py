"""Where the served model's files are, and what the router has to know of its config.

Decides the folder (shipped model, local folder, or hub id), and that a generation config may name
further end tokens; what ``config.json`` means is ``sangam_core.model_config``'s decision, for
workers too. The tokenizer is ``tokenizer``'s. Called once, at start.
"""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from sangam_core.errors import ConfigurationError
from sangam_core.model_config import ConfigFields, ModelTokens, model_tokens

SHIPPED_MODEL = "small"
"""Name of the model that comes with Sangam."""

_HUB_PATTERNS = ["*.json", "*.txt", "*.jinja"]
"""What the router fetches of a hub repository: never the weights, never code."""


def model_folder(model: str) -> Path:
    """The folder of a model: ``small``, a local path, or a Hugging Face hub id.

    Raises:
        ConfigurationError: there is no such folder, and the hub has no such repository or cannot
            be reached.
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
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigurationError(
            f"SANGAM_MODEL={model}: neither {SHIPPED_MODEL!r}, nor a folder, nor a hub id "
            "like 'GSAI-ML/LLaDA-8B-Instruct'"
        )
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS))
    except Exception as error:
        is_absent = isinstance(error, RepositoryNotFoundError) and not isinstance(
            error,
            GatedRepoError,  # derives from it, yet the repository is there
        )
        what = "not on the hub" if is_absent else "could not be read from the hub"
        raise ConfigurationError(f"SANGAM_MODEL={model}: {what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first line: the rest of what the hub's client says is about its own cache."""
    told = str(error).strip()
    return told.splitlines()[0].removeprefix("Got: ") if told else type(error).__name__


def read_model_tokens(folder: Path) -> ModelTokens:
    """Read ``config.json`` (and ``generation_config.json`` for further end tokens).

    Raises:
        ConfigurationError: naming the file and key that is missing or of the wrong kind.
    """
    fields = _fields(folder / "config.json")
    tokens = model_tokens(fields)
    eos_ids = list(tokens.eos_ids)
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos_ids += _fields(generation).token_ids("eos_token_id", tokens.vocab_size)
    if not eos_ids:
        raise fields.error("eos_token_id is missing")
    return replace(tokens, eos_ids=tuple(dict.fromkeys(eos_ids)))


def _fields(path: Path) -> ConfigFields:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return ConfigFields.parse(content, str(path))
