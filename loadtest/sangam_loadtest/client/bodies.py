"""Which HTTP body a request of a trace becomes.

Decides endpoint and fields; made-up prompts are token ids, so that their length is exact whatever
the tokenizer. Called by ``open_loop`` just before a request is due.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sangam_loadtest.traces.request import TraceRequest

FIRST_ID, LAST_ID = 32, 126
"""Printable ASCII where a token is a byte; plain characters in the published models' tables, whose
special tokens (the mask above all) have much higher ids."""
_POOL_IDS = 65_536


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """What all bodies of a run share.

    Attributes:
        has_timings: ask for Sangam's timings (other servers may refuse the field).
        extra: further fields of every body, e.g. ``{"unmasking": ..., "cache": "prefix"}``.
        seed: of the made-up prompts.
    """

    model: str
    has_timings: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Body:
    """A request ready to be sent; ``path`` follows the base URL, which ends before ``/v1``."""

    path: str
    content: bytes


class Bodies:
    """Makes bodies. Prompts differ from request to request, so that no prefix cache helps."""

    def __init__(self, options: BodyOptions) -> None:
        stream_options: dict[str, bool] = {"include_usage": True}
        if options.has_timings:
            stream_options["include_timings"] = True
        self._shared: dict[str, Any] = {
            "model": options.model,
            "stream": True,
            "stream_options": stream_options,
            "temperature": 0,
            **options.extra,
        }
        rng = random.Random(options.seed)
        self._pool = [str(rng.randint(FIRST_ID, LAST_ID)) for _ in range(_POOL_IDS)]
        self._seed = options.seed

    def of(self, index: int, request: TraceRequest) -> Body:
        """The body of a trace's request number ``index``."""
        fields = {**self._shared, "max_tokens": request.output_tokens}
        if request.is_exact_output:
            fields["ignore_eos"] = True
        if request.messages:
            fields["messages"] = [
                {"role": role, "content": content} for role, content in request.messages
            ]
            return Body("/v1/chat/completions", json.dumps(fields).encode())
        if request.text is not None:
            fields["prompt"] = request.text
            return Body("/v1/completions", json.dumps(fields).encode())
        head = json.dumps(fields)[:-1]
        ids = ",".join(self._made_up(index, request.prompt_tokens))
        return Body("/v1/completions", f'{head},"prompt":[{ids}]}}'.encode())

    def _made_up(self, index: int, count: int) -> list[str]:
        """A stretch of the pool from a place of the request's own; joins much faster than ids
        drawn one by one."""
        start = random.Random(self._seed * 1_000_003 + index).randrange(_POOL_IDS)
        ids = self._pool[start : start + count]
        while len(ids) < count:
            ids += self._pool[: count - len(ids)]
        return ids
