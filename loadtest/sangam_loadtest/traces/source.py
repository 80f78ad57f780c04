"""Which requests a run gets: one call from a trace's name or file to a list, filtered and seeded.

Decides the order (shuffled by the seed, or the file's own), what happens at the end of a file,
and which lengths are let through. Called by ``run``, ``capacity`` and the simulator.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from sangam_core.counted import counted
from sangam_core.errors import ConfigurationError
from sangam_loadtest.traces.csv_file import Columns, read_csv
from sangam_loadtest.traces.length_filter import LengthFilter, Rejections
from sangam_loadtest.traces.questions import question_requests
from sangam_loadtest.traces.request import TraceError, TraceRequest
from sangam_loadtest.traces.synthetic import SYNTHETIC_TRACES, Sessions, synthetic_requests
from sangam_loadtest.traces.text_files import (
    ServedTokens,
    arxiv_request,
    read_arxiv,
    read_sharegpt,
    sharegpt_request,
)
from sangam_router.model_files import SHIPPED_MODEL

QUESTIONS = "questions"
NAMED_TRACES = (*SYNTHETIC_TRACES, QUESTIONS)
_PATIENCE = 100_000
"""So many requests in a row that a filter rejects: nothing will come any more."""

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """A trace as a user asks for it.

    Attributes:
        trace: ``sharegpt``, ``arxiv`` (synthetic), ``questions``, or a file: ``.csv`` lengths,
            ``.json`` ShareGPT, ``.jsonl`` arXiv summarisation.
        seed: decides made-up lengths, questions, and a file's order.
        sessions: successive synthetic requests resemble each other.
        tokenizer_model: the served model, whose tokenizer counts texts.
        in_file_order: keep a file's order instead of shuffling it.
        is_repeated: begin again at a file's end instead of refusing.
    """

    trace: str
    seed: int = 0
    lengths: LengthFilter = field(default_factory=LengthFilter)
    sessions: Sessions | None = None
    columns: Columns = field(default_factory=Columns)
    tokenizer_model: str = SHIPPED_MODEL
    in_file_order: bool = False
    is_repeated: bool = False


def take_requests(spec: TraceSpec, count: int) -> list[TraceRequest]:
    """The trace's first ``count`` requests; the same spec and count give the same list.

    Not inside a running event loop (see ``ServedTokens``).

    Raises:
        TraceError: the trace cannot be read, or has too few requests.
        ConfigurationError: the spec contradicts itself.
    """
    if spec.sessions is not None and spec.trace not in SYNTHETIC_TRACES:
        raise ConfigurationError(f"sessions are made up; trace {spec.trace!r} has its own order")
    tokens: ServedTokens | None = None
    if spec.trace == QUESTIONS or Path(spec.trace).suffix in (".json", ".jsonl"):
        tokens = ServedTokens(spec.tokenizer_model)
    try:
        return _taken(spec, count, _requests(spec, tokens))
    finally:
        if tokens is not None:
            tokens.close()


def _taken(spec: TraceSpec, count: int, offered: Iterator[TraceRequest]) -> list[TraceRequest]:
    taken: list[TraceRequest] = []
    rejections = Rejections(spec.lengths)
    while len(taken) < count:
        request = next(offered, None)
        if request is None and taken:
            raise TraceError(
                f"trace {spec.trace}: {counted(len(taken), 'request')} "
                f"{'passes' if len(taken) == 1 else 'pass'} the filter, {count} are wanted; "
                "ask for fewer, widen the filter, or repeat the trace (--repeat)"
            )
        if request is None or rejections.num_requests >= _PATIENCE:
            raise TraceError(
                f"trace {spec.trace}: none of {counted(rejections.num_requests, 'request')} "
                f"{'in a row ' if request else ''}passes the filter; {rejections.advice()}"
            )
        if spec.lengths.lets_through(request):
            taken.append(request)
            rejections = Rejections(spec.lengths)
        else:
            rejections.add(request)
    return taken


def _requests(spec: TraceSpec, tokens: ServedTokens | None) -> Iterator[TraceRequest]:
    if spec.trace in SYNTHETIC_TRACES:
        return synthetic_requests(SYNTHETIC_TRACES[spec.trace], spec.seed, spec.sessions)
    if spec.trace == QUESTIONS:
        assert tokens is not None
        return question_requests(spec.seed, tokens)
    path = Path(spec.trace).expanduser()
    match path.suffix:
        case ".csv":
            return _in_order(spec, read_csv(path, spec.columns), _as_it_is)
        case ".json":
            assert tokens is not None
            return _in_order(spec, read_sharegpt(path), partial(sharegpt_request, tokens=tokens))
        case ".jsonl":
            assert tokens is not None
            counted = tokens
            return _in_order(
                spec, read_arxiv(path), lambda pair: arxiv_request(pair[0], pair[1], counted)
            )
    raise TraceError(
        f"trace {spec.trace!r}: neither {', '.join(NAMED_TRACES)} nor a .csv, .json or .jsonl file"
    )


def _as_it_is(request: TraceRequest) -> TraceRequest:
    return request


def _in_order(
    spec: TraceSpec, items: Sequence[ItemT], request_of: Callable[[ItemT], TraceRequest]
) -> Iterator[TraceRequest]:
    rng = random.Random(spec.seed)
    while True:
        order = list(range(len(items)))
        if not spec.in_file_order:
            rng.shuffle(order)
        for index in order:
            yield request_of(items[index])
        if not spec.is_repeated:
            return
