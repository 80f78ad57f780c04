"""Decides the tokenizer and chat template of the small model, and writes their files.

A token is a byte (its id is its value) or one of LLaDA's special tokens. ``train`` encodes with
the functions here; ``export`` writes ``tokenizer.json`` and ``tokenizer_config.json``, which give
the same ids in ``tokenizers`` and ``transformers`` (the unit tests compare them).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sangam_worker.small_model.material import Message

SPECIAL = {
    "<|startoftext|>": 256,
    "<|endoftext|>": 257,
    "<|start_header_id|>": 258,
    "<|end_header_id|>": 259,
    "<|eot_id|>": 260,
    "<|mdm_mask|>": 261,
}
BOS, EOS, START_HEADER, END_HEADER, EOT, MASK = SPECIAL.values()

CHAT_TEMPLATE = (
    "{% set loop_messages = messages %}"
    "{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}"
    "{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)


def encode_text(text: str) -> list[int]:
    """Ids of plain text, without special tokens."""
    return list(text.encode())


def encode_prompt(messages: Iterable[Message]) -> list[int]:
    """Ids of a dialogue as the chat template renders it, the assistant header at its end."""
    ids = [BOS]
    for message in messages:
        ids += [START_HEADER, *encode_text(message.role), END_HEADER, *encode_text("\n\n")]
        ids += [*encode_text(message.content.strip()), EOT]
    return [*ids, START_HEADER, *encode_text("assistant"), END_HEADER, *encode_text("\n\n")]


def decode(ids: Iterable[int]) -> str:
    """Text of the ids up to the first EOS; other special tokens are left out."""
    kept = bytearray()
    for token in ids:
        if token == EOS:
            break
        if token < 256:
            kept.append(token)
    return kept.decode(errors="replace")


def _byte_letters() -> dict[int, str]:
    """The printable letter that byte-level tokenizers write for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(plain))
    return letters


def write_tokenizer(folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    added = [
        {"id": index, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for text, index in SPECIAL.items()
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": False},
        "post_processor": None,
        "decoder": {**level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letter: byte for byte, letter in sorted(_byte_letters().items())},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mdm_mask|>",
        "additional_special_tokens": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)):
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
