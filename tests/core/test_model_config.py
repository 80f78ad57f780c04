"""What a model's configuration says of tokens and lengths, by either family's keys."""

from typing import Any

import pytest

from sangam_core.errors import ConfigurationError
from sangam_core.model_config import ConfigFields, ModelTokens, model_tokens

SOURCE = "m/config.json"
LLADA = {
    "architectures": ["LLaDAModelLM"],
    "vocab_size": 280,
    "mask_token_id": 261,
    "eos_token_id": 257,
    "max_sequence_length": 1024,
}
DREAM = {
    "architectures": ["DreamModel"],
    "vocab_size": 400,
    "mask_token_id": 300,
    "eos_token_id": [296, 297],
    "max_position_embeddings": 2048,
}


def read(config: dict[str, Any]) -> ModelTokens:
    return model_tokens(ConfigFields(config, SOURCE))


def test_each_family_has_its_own_keys() -> None:
    assert read(LLADA) == ModelTokens("llada", 280, 261, (257,), 1024)
    assert read(DREAM) == ModelTokens("dream", 400, 300, (296, 297), 2048)


def test_lladas_embedding_tells_the_vocabulary_where_it_has_its_own_size() -> None:
    assert read(LLADA | {"embedding_size": 288}).vocab_size == 288
    assert read(LLADA | {"embedding_size": None}).vocab_size == 280
    assert read(DREAM | {"embedding_size": 288}).vocab_size == 400


@pytest.mark.parametrize(("model_type", "family"), [("llada", "llada"), ("Dream", "dream")])
def test_without_architectures_the_model_type_tells(model_type: str, family: str) -> None:
    config = (LLADA if family == "llada" else DREAM) | {"model_type": model_type}
    assert read(config | {"architectures": None}).family == family
    assert read(config | {"architectures": []}).family == family


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architectures": ["BertModel"]}, "architectures ['BertModel'] is not supported"),
        ({"architectures": ["LLaDAModelLM", "DreamModel"]}, "is not supported"),
        ({"architectures": "LLaDAModelLM"}, "is not supported"),
        ({"architectures": None}, "architectures ['none'] is not supported"),
        ({"mask_token_id": 280}, "mask_token_id 280 is not in the vocabulary of 280"),
        ({"eos_token_id": [257, -1]}, "eos_token_id must hold ids in 0..279"),
        ({"max_sequence_length": None}, "max_sequence_length is missing"),
        ({"vocab_size": 2.5}, "vocab_size must be an integer"),
    ],
)
def test_what_cannot_be_served_is_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read(LLADA | change)
    assert str(refused.value).startswith(f"{SOURCE}: ")
    assert complaint in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_what_is_no_json_object_is_refused_with_its_source(content: bytes) -> None:
    with pytest.raises(ConfigurationError, match=f"^{SOURCE}: "):
        ConfigFields.parse(content, SOURCE)
