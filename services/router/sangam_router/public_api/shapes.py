"""The bodies that the public API answers with: OpenAI's shapes, and Sangam's extensions in them.

Pure: updates in, dictionaries out. ``chat`` and ``completions`` differ only here.
"""

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sangam_router.job import Denoised, FinishReason, Timings

Endpoint = Literal["chat", "completion"]

SYSTEM_FINGERPRINT = "sangam"
"""OpenAI's field for the backend's configuration; ours does not change answers."""


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request. A prompt counts once, however many choices it has."""

    num_prompt_tokens: int
    num_tokens_of_choice: dict[int, int] = field(default_factory=dict)

    def body(self) -> dict[str, int]:
        """OpenAI's ``usage``."""
        completion = sum(self.num_tokens_of_choice.values())
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt_tokens + completion,
        }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all bodies of one HTTP request share."""

    endpoint: Endpoint
    model: str
    response_id: str
    created: int

    @classmethod
    def new(cls, endpoint: Endpoint, model: str) -> "Envelope":
        """An envelope with a fresh id."""
        prefix = "chatcmpl" if endpoint == "chat" else "cmpl"
        return cls(endpoint, model, f"{prefix}-{uuid.uuid4().hex}", int(time.time()))

    def body(self, choices: Sequence[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        """A response, or a chunk of one, around its choices."""
        if self.endpoint == "chat":
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        else:
            kind = "text_completion"
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": list(choices),
        }

    def role_choice(self, index: int) -> dict[str, Any]:
        """The first chunk's choice of a chat answer: who speaks."""
        return self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """A chunk's choice with more text."""
        said = {"delta": {"content": text}} if self.endpoint == "chat" else {"text": text}
        return self._choice(index, said, None)

    def end_choice(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """A chunk's choice that says how the answer ended."""
        said: dict[str, Any] = {"delta": {}} if self.endpoint == "chat" else {"text": ""}
        return self._choice(index, said, reason)

    def full_choice(self, index: int, text: str, reason: FinishReason) -> dict[str, Any]:
        """A whole answer's choice."""
        if self.endpoint == "chat":
            message = {"role": "assistant", "content": text, "refusal": None}
            return self._choice(index, {"message": message}, reason)
        return self._choice(index, {"text": text}, reason)

    @staticmethod
    def _choice(index: int, said: dict[str, Any], reason: FinishReason | None) -> dict[str, Any]:
        return {"index": index, **said, "logprobs": None, "finish_reason": reason}


def denoising_body(
    denoised: Sequence[Denoised], text_of_token: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Commits as the client sees them: absolute positions, the prompt's tokens counted.

    ``text`` is the token by itself, special ones spelled out; a part of a character shows as
    U+FFFD.
    """
    return [
        {
            "block": item.block,
            "step": item.step,
            "position": item.commit.position,
            "token": item.commit.token,
            "confidence": _finite(item.commit.confidence),
            "text": text_of_token(item.commit.token),
        }
        for item in denoised
    ]


def _finite(confidence: float | None) -> float | None:
    """JSON has no infinity."""
    return confidence if confidence is not None and math.isfinite(confidence) else None


def timings_body(*timings: Timings) -> dict[str, Any]:
    """The ``sangam`` field: where an answer's time went, or each answer's of several."""
    if len(timings) == 1:
        return {"timings": asdict(timings[0])}
    return {"timings_of_choice": [asdict(item) for item in timings]}
