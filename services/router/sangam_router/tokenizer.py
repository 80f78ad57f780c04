"""Text to token ids and back, for prompts and answers, without torch and without remote code.

Decides how a checkpoint's tokenizer files are read and how chat content is kept from forging
special tokens. Limits on length are the public API's business, streaming is ``text_stream``'s.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from sangam_core.errors import ConfigurationError, InvalidRequest
from sangam_router.chat_template import ChatTemplate

_LONG_TEXT_CHARACTERS = 16_384
"""Longer texts take more than a few milliseconds to encode."""

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pre-tokenisation, which Dream's published ``vocab.json`` + ``merges.txt`` stand on."""


class TextTokenizer:
    """The served model's tokenizer and chat template.

    Raises:
        ConfigurationError: from ``read``, naming the file that is missing or cannot be used.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._literal = Tokenizer.from_str(tokenizer.to_str())
        self._literal.encode_special_tokens = True
        self._chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder().values()
        special = sorted((t.content for t in added if t.special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self.text_of_token = lru_cache(maxsize=65536)(self._text_of_token)

    @classmethod
    def read(cls, folder: Path) -> "TextTokenizer":
        """Read the tokenizer of a model folder."""
        settings = _read_json(folder / "tokenizer_config.json")
        if (folder / "tokenizer.json").is_file():
            try:
                tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            except Exception as error:
                raise ConfigurationError(f"{folder / 'tokenizer.json'}: {error}") from error
        elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            tokenizer = _qwen2_like(folder, settings)
        else:
            raise ConfigurationError(
                f"{folder}: holds neither tokenizer.json nor vocab.json and merges.txt"
            )
        return cls(tokenizer, _chat_template(folder, settings))

    async def encode(self, text: str) -> list[int]:
        """Ids of a completion prompt. Special tokens written in it are taken as such.

        A user of ``/v1/completions`` writes templates by hand, so this is the meaning wanted;
        what the tokenizer itself adds (a BOS, for some models) is added.
        """
        return await _off_the_loop_if_long(text, lambda: self._ids(self._tokenizer, text, True))

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a dialogue as the chat template renders it.

        Special tokens spelled out in a message are text there, never tokens: otherwise a message
        could end its turn and speak as another role. They pass the template under a random alias
        (so that its trimming and tests work on them as on other text) and are encoded literally.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the dialogue.
        """
        if self._chat_template is None:
            raise InvalidRequest(
                "messages: this model has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        names: dict[str, str] = {}
        if self._special is not None:
            nonce = secrets.token_hex(8)

            def alias(match: re.Match[str]) -> str:
                # One for each token, not for each place: a message may hold a hundred thousand.
                return names.setdefault(match.group(), f"\ue000{nonce}:{len(names)}\ue001")

            pattern = self._special
            messages = [
                {key: pattern.sub(alias, value) for key, value in message.items()}
                for message in messages
            ]
        text = self._chat_template.render(messages)
        aliases = {name: token for token, name in names.items()}
        return await _off_the_loop_if_long(text, lambda: self._ids_with_literals(text, aliases))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are left out, incomplete UTF-8 shows as U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _text_of_token(self, token: int) -> str:
        """Text of one token by itself, special ones spelled out (for the unmasking view)."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def _ids_with_literals(self, text: str, aliases: Mapping[str, str]) -> list[int]:
        """Ids of rendered text, what stands behind an alias encoded as text only."""
        if not aliases:
            return self._ids(self._tokenizer, text)
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, aliases))})", text):
            is_alias = part in aliases
            ids += self._ids(
                self._literal if is_alias else self._tokenizer, aliases[part] if is_alias else part
            )
        return ids

    @staticmethod
    def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
        if len(text) <= _LONG_TEXT_CHARACTERS:
            encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:  # only batches release the GIL
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


async def _off_the_loop_if_long(text: str, encode: Callable[[], list[int]]) -> list[int]:
    """Encode; a long text in a thread, so that others go on."""
    if len(text) <= _LONG_TEXT_CHARACTERS:
        return encode()
    return await asyncio.to_thread(encode)


def _qwen2_like(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """A byte-level BPE as Qwen2's, from Dream's files; added tokens keep the ids they state."""
    try:
        model = BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:
        raise ConfigurationError(f"{folder}: vocab.json, merges.txt: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = settings.get("added_tokens_decoder") or {}
    for index, entry in sorted((int(index), entry) for index, entry in added.items()):
        content = entry["content"]
        token = AddedToken(
            content,
            special=bool(entry.get("special")),
            normalized=bool(entry.get("normalized", False)),
            lstrip=bool(entry.get("lstrip", False)),
            rstrip=bool(entry.get("rstrip", False)),
            single_word=bool(entry.get("single_word", False)),
        )
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(content) != index:
            raise ConfigurationError(
                f"{folder / 'tokenizer_config.json'}: added token {content!r} cannot have id "
                f"{index}: the ids before it have gaps"
            )
    return tokenizer


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """``chat_template.jinja`` if there, else the default one of ``tokenizer_config.json``."""
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if not source:
        return None
    return ChatTemplate(source, _special_tokens(settings))


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name, value in settings.items():
        if name.endswith("_token") and value is not None and not isinstance(value, bool):
            tokens[name] = value["content"] if isinstance(value, dict) else str(value)
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return content if isinstance(content, dict) else {}
