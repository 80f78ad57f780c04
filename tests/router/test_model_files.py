"""The model's files: where they are, and what the router reads of the config."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.router.builders import write_model_folder

from sangam_core.errors import ConfigurationError
from sangam_router.model_files import model_folder, read_model_tokens


def dream_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    settings = {
        "architectures": ["DreamModel"],
        "vocab_size": 152064,
        "mask_token_id": 151666,
        "eos_token_id": 151643,
        "max_position_embeddings": 131072,
    }
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


def test_a_llada_config_is_read(tmp_path: Path) -> None:
    tokens = read_model_tokens(write_model_folder(tmp_path / "m", embedding_size=300))
    assert (tokens.family, tokens.vocab_size, tokens.mask_id) == ("llada", 300, 261)
    assert (tokens.eos_ids, tokens.max_sequence_tokens) == ((257,), 1024)


def test_without_architectures_the_model_type_tells(tmp_path: Path) -> None:
    folder = dream_folder(tmp_path / "m", architectures=None, model_type="Dream")
    assert read_model_tokens(folder).family == "dream"


def test_a_dream_config_is_read_with_the_end_tokens_of_its_generation_config(
    tmp_path: Path,
) -> None:
    folder = dream_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [151643, 151645]}')
    tokens = read_model_tokens(folder)
    assert (tokens.family, tokens.max_sequence_tokens) == ("dream", 131072)
    assert tokens.eos_ids == (151643, 151645)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"eos_token_id": None}, "eos_token_id"),
        ({"max_sequence_length": "long"}, "max_sequence_length"),
        ({"vocab_size": True}, "vocab_size"),
        ({"embedding_size": "all"}, "embedding_size"),
        ({"embedding_size": 200}, "mask_token_id 261 is not in the vocabulary of 200"),
        ({"eos_token_id": 300}, "eos_token_id must hold ids in 0..287"),
        ({"architectures": ["LLaDAModelLM", "LlamaForCausalLM"]}, "architectures"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        read_model_tokens(write_model_folder(tmp_path / "m", **change))


def test_a_folder_is_taken_as_it_is(model_folder: Path) -> None:
    from sangam_router.model_files import model_folder as find

    assert find(str(model_folder)) == model_folder


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere", "just-a-word", "a/b/c"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="neither"):
        model_folder(name)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        model_folder(str(tmp_path))


def test_end_tokens_of_the_generation_config_are_checked_too(tmp_path: Path) -> None:
    folder = dream_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [151643, 152064]}')
    with pytest.raises(ConfigurationError, match=r"generation_config\.json: eos_token_id"):
        read_model_tokens(folder)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    folder = dream_folder(tmp_path / "m")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"config\.json: cannot be read"):
        read_model_tokens(folder)
