"""How ShareGPT's JSON and arXiv-summarisation's JSONL are read: requests with real text.

Decides which parts are prompts, and that an answer is as long as the reference text, both counted
by the served model's tokenizer. Texts are tokenised one by one as they are asked for: a run of a
thousand requests need not tokenise a hundred thousand. Called by ``source``.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from sangam_loadtest.traces.request import TraceError, TraceRequest, malformed
from sangam_router.model_files import model_folder
from sangam_router.tokenizer import TextTokenizer

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
Dialogue = tuple[tuple[str, str], ...]


class CountsTokens(Protocol):
    """What readers need of a tokenizer."""

    def of_text(self, text: str) -> int:
        """Tokens of a completion's prompt."""

    def of_dialogue(self, messages: Dialogue) -> int:
        """Tokens of a dialogue as the chat template renders it."""


class ServedTokens:
    """Counts with the served model's tokenizer, read as the router reads it.

    Not for use inside a running event loop: the router's tokenizer is asynchronous.
    """

    def __init__(self, model: str) -> None:
        self._tokenizer = TextTokenizer.read(model_folder(model))
        self._runner = asyncio.Runner()

    def of_text(self, text: str) -> int:
        """Tokens of a completion's prompt."""
        return len(self._runner.run(self._tokenizer.encode(text)))

    def of_dialogue(self, messages: Dialogue) -> int:
        """Tokens of a dialogue as the chat template renders it."""
        told = [{"role": role, "content": content} for role, content in messages]
        return len(self._runner.run(self._tokenizer.encode_chat(told)))

    def close(self) -> None:
        """End the event loop."""
        self._runner.close()


def read_text_file(path: Path) -> str:
    """A file's text. ``TraceError`` where there is none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a text file in UTF-8 ({error.reason})") from error


# -- ShareGPT ---------------------------------------------------------------------------------


def read_sharegpt(path: Path) -> list[Dialogue]:
    """Dialogues up to and including one answer: each answer of a conversation makes one.

    The format: a list of ``{"conversations": [{"from": "human", "value": ...}, ...]}``; answers
    without a question before them and empty ones are passed over, as ShareGPT has many.
    """
    try:
        content = json.loads(read_text_file(path))
    except json.JSONDecodeError as error:
        raise malformed(path, error.lineno, f"column {error.colno}", error.msg) from error
    if not isinstance(content, list):
        raise TraceError(f"{path}: must hold a JSON list of conversations")
    found: list[Dialogue] = []
    for index, entry in enumerate(content):
        found += _dialogues(path, index, entry)
    if not found:
        raise TraceError(f"{path}: no conversation has a question and an answer")
    return found


def _dialogues(path: Path, index: int, entry: Any) -> Iterator[Dialogue]:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise TraceError(f"{path}, [{index}].conversations: must be a list of turns")
    told: list[tuple[str, str]] = []
    for number, turn in enumerate(turns):
        where = f"{path}, [{index}].conversations[{number}]"
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise TraceError(f"{where}.value: must be a text")
        role = _ROLES.get(str(turn.get("from")))
        if role is None:
            known = ", ".join(_ROLES)
            raise TraceError(f"{where}.from: must be one of {known}, not {turn.get('from')!r}")
        told.append((role, turn["value"]))
        if role == "assistant" and turn["value"].strip() and told[-2:][0][0] == "user":
            yield tuple(told)


def sharegpt_request(dialogue: Dialogue, tokens: CountsTokens) -> TraceRequest:
    """A chat request for the dialogue's last answer, exactly as long as that answer."""
    *before, (_, answer) = dialogue
    messages = tuple(before)
    return TraceRequest(
        tokens.of_dialogue(messages), max(1, tokens.of_text(answer)), messages=messages
    )


# -- arXiv ------------------------------------------------------------------------------------


def read_arxiv(path: Path) -> list[tuple[str, str]]:
    """(article, abstract) of each line: ``article`` and ``abstract``, or ``article_text`` and
    ``abstract_text`` (lists of sentences, as first published)."""
    found: list[tuple[str, str]] = []
    for number, line in enumerate(read_text_file(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise malformed(path, number, f"column {error.colno}", error.msg) from error
        if not isinstance(entry, dict):
            raise malformed(path, number, "column 1", "must be a JSON object")
        found.append(
            (_part(path, number, entry, "article"), _part(path, number, entry, "abstract"))
        )
    if not found:
        raise TraceError(f"{path}: holds no articles")
    return found


def _part(path: Path, line: int, entry: dict[str, Any], name: str) -> str:
    value = entry.get(name, entry.get(f"{name}_text"))
    if isinstance(value, list) and all(isinstance(sentence, str) for sentence in value):
        value = " ".join(value).replace("<S>", "").replace("</S>", "")
    if not isinstance(value, str) or not value.strip():
        raise malformed(
            path, line, name, f"must be a text (or {name}_text a list of sentences), not empty"
        )
    return value


def arxiv_request(article: str, abstract: str, tokens: CountsTokens) -> TraceRequest:
    """A completion request of the article, its answer exactly as long as the abstract."""
    return TraceRequest(tokens.of_text(article), max(1, tokens.of_text(abstract)), text=article)
